"""The tasks that the demo model learns: small questions whose answers a program can check.

Everything comes from a `random.Random`, so that one seed gives one sequence of samples. It knows
nothing of tokens or of chat formats; `chat.py` does.

Training never sees a held-out question. The split is decided by the question's *content* (its
operands, words or facts) and not by its wording: `12 + 34` held out is held out in every template
and in both orders.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

HELD_OUT_MODULUS = 20
"""One question in this many is held out: those whose hash is a multiple of it."""


class Split(Enum):
    """Which side of the hash split a sample is on."""

    TRAIN = "train"
    HELD_OUT = "held-out"


@dataclass(frozen=True, slots=True)
class Sample:
    """One question and its one expected answer."""

    kind: str  # a key of TASKS
    prompt: str  # what the user writes
    answer: str  # what the model should write, without surrounding whitespace
    key: str  # the question's content, free of wording; the split hashes this


def split_of(key: str) -> Split:
    """The side that the content `key` is on: SHA-256, first 8 bytes, modulo `HELD_OUT_MODULUS`."""
    digest = hashlib.sha256(key.encode()).digest()
    held_out = int.from_bytes(digest[:8], "big") % HELD_OUT_MODULUS == 0
    return Split.HELD_OUT if held_out else Split.TRAIN


def draw(kind: str, rng: random.Random, split: Split) -> Sample:
    """One sample of `kind` on the wanted side, by rejection."""
    make = TASKS[kind].make
    while True:
        sample = make(rng)
        if split_of(sample.key) is split:
            return sample


def stream(seed: int, split: Split) -> Iterator[Sample]:
    """Endless samples of all kinds, each kind in proportion to its weight."""
    rng = random.Random(seed)
    kinds = list(TASKS)
    weights = [TASKS[kind].weight for kind in kinds]
    while True:
        yield draw(rng.choices(kinds, weights)[0], rng, split)


def _words(text: str) -> tuple[str, ...]:
    """Long word lists read better, and diff better, as running text."""
    return tuple(text.split())


NAMES = _words(
    "Ada Alan Amir Ana Ben Carla Chen Clara David Diego Elif Elena Emma Erik Fatima Felix Grace "
    "Hana Hugo Ines Ivan Jana Jonas Julia Kai Karl Lara Leo Lina Lucas Maria Marta Max Mei Mia "
    "Nadia Nina Noah Nora Olga Omar Oscar Paula Pedro Rosa Sam Sara Sofia Tara Theo Tom Uma Vera "
    "Victor Yuki Zoe José Zoë Łukasz Søren"
)
CITIES = _words(
    "Athens Bergen Berlin Boston Cairo Cork Delhi Dublin Geneva Ghent Hanoi Kyoto Lagos Lima "
    "Lisbon London Lyon Madrid Milan Nairobi Oslo Paris Porto Prague Quito Riga Rome Seoul Sofia "
    "Tokyo Toronto Turin Utrecht Vienna Warsaw Zagreb Zürich Malmö Kraków"
)
WORDS = _words(
    "apple bird boat book cat cloud cup dog door fig fish fox green hat hill house key lamp leaf "
    "lemon moon owl pear pen plum rain red river rose sand sea ship snow star stone sun tea tree "
    "wind wolf"
)
FOREIGN = _words(
    "café naïve crème über straße señor mañana fjord smörgås žlutý źródło ångström αβγ λόγος кот "
    "мир привет да 猫 東京 水 日本 안녕 שלום नमस्ते"
)
EMOJI = _words("🙂 😀 🚀 🌊 🌙 ⭐ 🔥 🍎 🍋 🐟 🦊 🐱 🎉 🎈 ❤️ 👍 🏠 🌱 ☕ 🎵 🧩 👩‍🚀")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")
_ONSETS = _words("b d f g k l m n p r s t v z br tr st")
_VOWELS = _words("a e i o u")


def _sum(rng: random.Random) -> Sample:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    prompt = rng.choice(
        (
            f"What is {a} + {b}?",
            f"{a} + {b} =",
            f"Add {a} and {b}.",
            f"What is the sum of {a} and {b}?",
            f"How much is {a} plus {b}?",
        )
    )
    return Sample("sum", prompt, str(a + b), f"sum {min(a, b)} {max(a, b)}")


def _difference(rng: random.Random) -> Sample:
    b, a = sorted((rng.randint(10, 99), rng.randint(10, 99)))
    prompt = rng.choice(
        (
            f"What is {a} - {b}?",
            f"{a} - {b} =",
            f"Subtract {b} from {a}.",
            f"How much is {a} minus {b}?",
            f"Take {b} away from {a}.",
        )
    )
    return Sample("difference", prompt, str(a - b), f"difference {a} {b}")


def _digit(rng: random.Random) -> Sample:
    number = str(rng.randint(100, 9_999_999))
    number = number[: rng.randint(3, len(number))]
    index = rng.randrange(len(number))
    ordinal = ORDINALS[index]
    prompt = rng.choice(
        (
            f"What is the {ordinal} digit of {number}?",
            f"Give the {ordinal} digit of the number {number}.",
            f"Which digit of {number} is the {ordinal}?",
            f"In {number}, what is digit {index + 1}?",
        )
    )
    return Sample("digit", prompt, number[index], f"digit {number} {index}")


def _reverse(rng: random.Random) -> Sample:
    letters = [rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 6))]
    spaced = " ".join(letters)
    prompt = rng.choice(
        (
            f"Reverse these letters: {spaced}",
            f"Write the letters {spaced} backwards.",
            f"What is {spaced} in reverse order?",
            f"Reverse: {spaced}",
        )
    )
    return Sample("reverse", prompt, " ".join(reversed(letters)), f"reverse {spaced}")


def _sort(rng: random.Random) -> Sample:
    digits = [rng.choice("0123456789") for _ in range(rng.randint(3, 6))]
    spaced = " ".join(digits)
    prompt = rng.choice(
        (
            f"Sort these digits: {spaced}",
            f"Put the digits {spaced} in ascending order.",
            f"Order from small to large: {spaced}",
            f"Sort: {spaced}",
        )
    )
    return Sample("sort", prompt, " ".join(sorted(digits)), f"sort {spaced}")


def _count(rng: random.Random) -> Sample:
    word, other = rng.sample(WORDS, 2)
    times = rng.randint(1, 9)
    listed = [word] * times + [other] * rng.choice((0, 0, 1, 2, 3))
    rng.shuffle(listed)
    text = " ".join(listed)
    prompt = rng.choice(
        (
            f"How many times is the word {word} in: {text}",
            f'Count the word "{word}": {text}',
            f"How often does {word} occur here? {text}",
        )
    )
    return Sample("count", prompt, str(times), f"count {word} {text}")


@dataclass(frozen=True, slots=True)
class _Person:
    name: str
    age: int
    city: str

    @property
    def key(self) -> str:
        return f"{self.name} {self.age} {self.city}"


def _invented(rng: random.Random) -> str:
    """A pronounceable name that is in no list, so that copying is learnt and not the list."""
    syllables = (rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.randint(2, 3)))
    return "".join(syllables).capitalize()


def _person(rng: random.Random) -> _Person:
    return _Person(
        name=rng.choice(NAMES) if rng.random() < 0.6 else _invented(rng),
        age=rng.randint(5, 99),
        city=rng.choice(CITIES) if rng.random() < 0.6 else _invented(rng),
    )


def _sentence(rng: random.Random, person: _Person) -> str:
    name, age, city = person.name, person.age, person.city
    return rng.choice(
        (
            f"{name} is {age} years old and lives in {city}.",
            f"{name}, {age}, is from {city}.",
            f"In {city} lives {name}, aged {age}.",
            f"My friend {name} from {city} is {age}.",
            f"At {age}, {name} moved to {city}.",
        )
    )


def _extract(rng: random.Random) -> Sample:
    person = _person(rng)
    sentence = _sentence(rng, person)
    field, value, questions = rng.choice(
        (
            ("name", person.name, ("What is the name?", "Who is it?", "Give the name.")),
            ("age", str(person.age), ("What is the age?", "How old?", "Give the age.")),
            ("city", person.city, ("Which city?", "Where?", "Give the city.")),
        )
    )
    question = rng.choice(questions)
    prompt = f"{sentence} {question}" if rng.random() < 0.6 else f"{question} {sentence}"
    return Sample("extract", prompt, value, f"extract {field} {person.key}")


def _json(rng: random.Random) -> Sample:
    person = _person(rng)
    name, age, city = person.name, person.age, person.city
    prompt = rng.choice(
        (
            f"Write as JSON: name {name}, age {age}, city {city}",
            f"Make a JSON object with name {name}, age {age} and city {city}.",
            f"JSON with name, age and city: {_sentence(rng, person)}",
            f"{_sentence(rng, person)} Write this as JSON.",
        )
    )
    answer = json.dumps({"name": name, "age": age, "city": city}, ensure_ascii=False)
    return Sample("json", prompt, answer, f"json {person.key}")


def _compare(rng: random.Random) -> Sample:
    top = rng.choice((99, 99, 999))
    a = rng.randint(1, top)
    # Close pairs are the hard ones; two uniform draws would seldom give any.
    b = rng.randint(1, top) if rng.random() < 0.6 else max(1, a + rng.randint(-9, 9))
    prompt = rng.choice(
        (
            f"Is {a} more than {b}?",
            f"Is {a} greater than {b}?",
            f"Yes or no: {a} is larger than {b}.",
        )
    )
    return Sample("compare", prompt, "yes" if a > b else "no", f"compare {a} {b}")


def _range(rng: random.Random) -> Sample:
    first = rng.randint(1, 88)
    last = first + rng.randint(2, 11)
    prompt = rng.choice(
        (
            f"Count from {first} to {last}.",
            f"List the numbers from {first} to {last}.",
            f"Write the numbers {first} to {last}.",
        )
    )
    answer = " ".join(str(number) for number in range(first, last + 1))
    return Sample("range", prompt, answer, f"range {first} {last}")


def _echo(rng: random.Random) -> Sample:
    pools = (EMOJI, FOREIGN, WORDS)
    items = [rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 3))]
    text = " ".join(items)
    prompt = rng.choice(
        (
            f'Repeat "{text}"',
            f'Say exactly this: "{text}"',
            f'Write the text between the quotes: "{text}"',
            f'"{text}" - repeat that.',
        )
    )
    return Sample("echo", prompt, text, f"echo {text}")


@dataclass(frozen=True, slots=True)
class Task:
    """How to make a kind of sample, and how often training should."""

    make: Callable[[random.Random], Sample]
    weight: float
    """Relative share of the training stream.

    What is learnt slowly comes more often, above all where the answer is one token: the loss is a
    mean over answer tokens, of which long answers would otherwise bring nearly all.
    """


TASKS: dict[str, Task] = {
    "sum": Task(_sum, 1.5),
    "difference": Task(_difference, 1.5),
    "digit": Task(_digit, 4.0),
    "reverse": Task(_reverse, 1.2),
    "sort": Task(_sort, 1.0),
    "count": Task(_count, 4.0),
    "extract": Task(_extract, 0.8),
    "json": Task(_json, 0.6),
    "compare": Task(_compare, 3.0),
    "range": Task(_range, 0.5),
    "echo": Task(_echo, 1.0),
}
