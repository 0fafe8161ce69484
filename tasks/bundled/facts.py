"""The closed table of facts that the bundled mmlu questions ask for. Knows how to ask, not with which options."""

from dataclasses import dataclass

CAPITALS = {
    "France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Germany": "Berlin", "Norway": "Oslo", "Poland": "Warsaw",
    "Japan": "Tokyo", "China": "Beijing", "Iran": "Tehran", "Nepal": "Kathmandu", "Egypt": "Cairo", "Kenya": "Nairobi",
    "Ghana": "Accra", "Cuba": "Havana", "Peru": "Lima", "Canada": "Ottawa",
}  # fmt: skip
CONTINENTS = {
    "Europe": ("France", "Spain", "Italy", "Germany", "Norway", "Poland"),
    "Asia": ("Japan", "China", "Iran", "Nepal"),
    "Africa": ("Egypt", "Kenya", "Ghana"),
    "America": ("Cuba", "Peru", "Canada"),
}
ALL_CONTINENTS = (*CONTINENTS, "Australia", "Antarctica")
OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("old", "new"), ("wet", "dry"), ("rich", "poor"),
    ("hard", "soft"), ("high", "low"), ("open", "closed"), ("full", "empty"),
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
KINDS = {
    "animal": ("dog", "cat", "horse", "cow", "goat", "fox"),
    "fruit": ("pear", "plum", "lemon", "grape", "cherry", "fig"),
    "metal": ("iron", "gold", "silver", "copper", "zinc", "tin"),
    "tool": ("hammer", "saw", "drill", "axe", "file", "spade"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """`wordings` are questions, `sentence` says it, `alike` are the value and what a wrong option may be."""

    kind: str
    about: str
    value: str
    wordings: tuple[str, ...]
    sentence: str
    alike: tuple[str, ...]


def geography() -> tuple[Fact, ...]:
    homes = {country: continent for continent, countries in CONTINENTS.items() for country in countries}
    facts = [(*_capital(country, city), _home(country, homes[country])) for country, city in CAPITALS.items()]
    return tuple(fact for three in facts for fact in three)


def _capital(country: str, city: str) -> tuple[Fact, Fact]:
    sentence = f"The capital of {country} is {city}."
    cities, countries = tuple(CAPITALS.values()), tuple(CAPITALS)
    asked = (f"What is the capital of {country}?", f"Which city is the capital of {country}?")
    back = (f"Of which country is {city} the capital?", f"Which country has the capital {city}?")
    return (
        Fact(kind="capital", about=country, value=city, wordings=asked, sentence=sentence, alike=cities),
        Fact(kind="country", about=city, value=country, wordings=back, sentence=sentence, alike=countries),
    )


def _home(country: str, continent: str) -> Fact:
    asked = (f"On which continent is {country}?", f"Which continent is {country} on?")
    sentence = f"The continent of {country} is {continent}."
    return Fact(
        kind="continent", about=country, value=continent, wordings=asked, sentence=sentence, alike=ALL_CONTINENTS
    )


def everyday() -> tuple[Fact, ...]:
    return (*_opposites(), *_days())


def _opposites() -> list[Fact]:
    words = tuple(word for pair in OPPOSITES for word in pair)
    return [
        Fact(
            kind="opposite",
            about=word,
            value=other,
            wordings=(f"What is the opposite of {word}?", f"Which word is the opposite of {word}?"),
            sentence=f"The opposite of {word} is {other}.",
            alike=tuple(each for each in words if each != word),
        )
        for pair in OPPOSITES
        for word, other in (pair, pair[::-1])
    ]


def _days() -> list[Fact]:
    return [
        Fact(
            kind=f"day {side}",
            about=day,
            value=DAYS[(place + step) % 7],
            wordings=(f"Which day comes {side} {day}?", f"What day is the day {side} {day}?"),
            sentence=f"The day {side} {day} is {DAYS[(place + step) % 7]}.",
            alike=tuple(each for each in DAYS if each != day),
        )
        for place, day in enumerate(DAYS)
        for side, step in (("after", 1), ("before", -1))
    ]
