"""The demo model's corpus: chats generated from a seed, each with one right answer.

Owns the tasks and their wording. Knows no tokenizer and no model.

Retrieval is what the model is for: its answer needs every page of the prompt in its place, so a broken transfer shows as a
wrong word. Training chats ask many questions after one list; held-out chats ask one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

Task = Literal["retrieval", "copying", "sums", "counting", "greetings"]
TASKS: tuple[Task, ...] = ("retrieval", "copying", "sums", "counting", "greetings")

_ONSETS = (
    "b",
    "br",
    "c",
    "cl",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
    "z",
)
_MIDDLES = ("a", "e", "i", "o", "u", "ar", "el", "in", "or", "un")
_ENDS = ("den", "ko", "lan", "mi", "net", "pa", "rus", "sol", "ta", "vex")


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its answer. weight: how much of the training loss the answer carries."""

    user: str
    answer: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation; a held-out one has a single turn."""

    task: Task
    turns: tuple[Turn, ...]


def _words(count: int, seed: int) -> tuple[str, ...]:
    every = [a + b + c for a in _ONSETS for b in _MIDDLES for c in _ENDS]
    Random(seed).shuffle(every)
    return tuple(every[:count])


_ALL = _words(1000, seed=11)
KEYS, VALUES = _ALL[:500], _ALL[500:]
"""Names and values of the lists: invented words, so that no answer can be known without reading the list."""

_LIST_OPENINGS = ("Here is a list.", "Remember these pairs:", "Read this table.", "These are the entries:")
_QUESTIONS = ("What is {key}?", "{key}?", "Which value belongs to {key}?", "Look up {key}.", "What is the value of {key}?")
_HELLOS = (
    "Hello",
    "Hi",
    "Hey",
    "Hello there",
    "Good morning",
    "Good evening",
    "Hi there",
    "Hello!",
    "Hi!",
    "Hey!",
    "Good morning!",
)
_HOWS = ("How are you?", "How are you doing?", "How is it going?")
_WHOS = ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.")
_THANKS = ("Thanks", "Thank you", "Thanks!", "Thank you!", "Bye", "Goodbye", "Bye!")
HELLO = "Hello! How can I help you?"
HOW = "I am fine, thank you."
WHO = "I am the demo model of Tandem."
THANKS = "You are welcome. Goodbye!"


def retrieval(random: Random, lines: int, questions: int = 1) -> Chat:
    """A list of `lines` pairs, then `questions` questions about it."""
    keys = random.sample(KEYS, lines)
    pairs = {key: random.choice(VALUES) for key in keys}
    table = "\n".join(f"{key} {value}" for key, value in pairs.items())
    asked = [random.choice(keys) for _ in range(questions)]
    form = random.choice(_QUESTIONS)
    opening = f"{random.choice(_LIST_OPENINGS)}\n{table}\n"
    turns = []
    for number, key in enumerate(asked):
        user = (opening if number == 0 else "") + form.format(key=key)
        turns.append(Turn(user, f"{key} {pairs[key]}"))
    return Chat("retrieval", tuple(turns))


def copying(random: Random, words: int) -> Chat:
    """A line of words and digits to repeat."""
    parts = [random.choice(_ALL) if random.random() < 0.85 else str(random.randrange(100)) for _ in range(words)]
    line = " ".join(parts)
    form = random.choice(("Copy this line: {}", "Repeat: {}", "Repeat after me: {}", "Copy: {}", "Say: {}"))
    return Chat("copying", (Turn(form.format(line), line),))


def sums(random: Random, largest: int = 20) -> Chat:
    """The sum of two small numbers."""
    a, b = random.randrange(largest + 1), random.randrange(largest + 1)
    form = random.choice(
        ("What is {} + {}?", "{} + {}", "{} + {} =", "Add {} and {}.", "What is {} plus {}?", "How much is {} + {}?")
    )
    return Chat("sums", (Turn(form.format(a, b), f"{a} + {b} = {a + b}"),))


def counting(random: Random, longest: int = 20) -> Chat:
    """Count from one number to another."""
    first = random.randrange(50)
    last = first + random.randrange(1, longest)
    form = random.choice(("Count from {} to {}.", "Count from {} to {}", "Please count from {} to {}.", "Count: {} to {}"))
    return Chat("counting", (Turn(form.format(first, last), " ".join(str(n) for n in range(first, last + 1))),))


def greetings(random: Random) -> Chat:
    """Hello, thanks and who are you."""
    forms, answer = random.choice(((_HELLOS, HELLO), (_HOWS, HOW), (_WHOS, WHO), (_THANKS, THANKS)))
    return Chat("greetings", (Turn(random.choice(forms), answer),))


_SHORT: dict[Task, Callable[[Random], Chat]] = {
    "copying": lambda random: copying(random, random.randrange(1, 25)),
    "sums": sums,
    "counting": counting,
    "greetings": greetings,
}


def short_chat(random: Random) -> Chat:
    """A chat of any task but retrieval."""
    tasks: tuple[Task, ...] = ("copying", "sums", "counting", "greetings")
    return _SHORT[random.choices(tasks, weights=(3, 3, 2, 1))[0]](random)


def several(random: Random, count: int) -> Chat:
    """Short chats joined into one conversation, so that a training row is well filled."""
    chats = [short_chat(random) for _ in range(count)]
    return Chat("greetings", tuple(turn for chat in chats for turn in chat.turns))


def held_out(task: Task, size: int, seed: int) -> Chat:
    """One question of a task that training never draws. size: lines of a retrieval list, words of a line to copy; else unused."""
    random = Random(f"held out {task} {size} {seed}")
    if task == "retrieval":
        return retrieval(random, size)
    if task == "copying":
        return copying(random, size)
    return _SHORT[task](random)


def texts(seed: int, count: int) -> Iterator[str]:
    """Plain text of every task, for training the tokenizer."""
    random = Random(f"tokenizer {seed}")
    for _ in range(count):
        for chat in (retrieval(random, 20, 4), several(random, 4)):
            yield "\n".join(f"user\n{turn.user}\nassistant\n{turn.answer}" for turn in chat.turns)
    for word in _ALL:
        yield " ".join([word] * 20)
        yield "\n".join([word] * 20)
