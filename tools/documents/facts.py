"""The closed tables of facts that the bundled mmlu questions ask for."""

CONTINENTS = {
    "Africa": ("Egypt", "Kenya", "Ghana", "Mali", "Libya"),
    "America": ("Cuba", "Peru", "Canada", "Chile", "Brazil"),
    "Asia": ("Japan", "China", "Iran", "Nepal", "India"),
    "Europe": ("France", "Spain", "Italy", "Norway", "Poland"),
}
KINDS = {
    "animal": ("dog", "cat", "horse", "cow", "goat", "fox"),
    "fruit": ("pear", "plum", "lemon", "grape", "cherry", "fig"),
    "metal": ("iron", "gold", "silver", "copper", "zinc", "tin"),
    "tool": ("hammer", "saw", "drill", "axe", "file", "spade"),
}
