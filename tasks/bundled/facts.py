"""The closed table of facts that the bundled mmlu questions ask for."""

CONTINENTS = {
    "Europe": ("France", "Spain", "Italy", "Germany", "Norway", "Poland"),
    "Asia": ("Japan", "China", "Iran", "Nepal"),
    "Africa": ("Egypt", "Kenya", "Ghana"),
    "America": ("Cuba", "Peru", "Canada"),
}
KINDS = {
    "animal": ("dog", "cat", "horse", "cow", "goat", "fox"),
    "fruit": ("pear", "plum", "lemon", "grape", "cherry", "fig"),
    "metal": ("iron", "gold", "silver", "copper", "zinc", "tin"),
    "tool": ("hammer", "saw", "drill", "axe", "file", "spade"),
}
