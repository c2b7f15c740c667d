"""The demo model's corpus: chats generated from a seed, each with one right answer.

Owns the tasks, their wording, and what is held out from training. Knows no tokenizer and no model.

Retrieval is what the model is for: its answer needs every page of the prompt in its place, so a broken transfer shows as a
wrong word. Training chats ask many questions after one list; held-out chats ask one, and always about a pair of key and value
that no training list contains.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

DemoTask = Literal["retrieval", "copying", "sums", "counting", "greetings"]
TASKS: tuple[DemoTask, ...] = ("retrieval", "copying", "sums", "counting", "greetings")

# A literal of 29 strings would read worse than this.
_ONSETS = "b br c cl d dr f fl g gr h j k l m n p pl r s st t tr v w z".split()  # noqa: SIM905
_MIDDLES = "a e i o u ar el in or un".split()  # noqa: SIM905
_ENDS = "den ko lan mi net pa rus sol ta vex".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class DemoTurn:
    """One question and its answer."""

    user: str
    answer: str


@dataclass(frozen=True, slots=True)
class DemoChat:
    """A conversation; a held-out one has a single turn. system: the system message, or empty for none."""

    task: DemoTask
    turns: tuple[DemoTurn, ...]
    system: str = ""


def _words(count: int, seed: int) -> tuple[str, ...]:
    every = [a + b + c for a in _ONSETS for b in _MIDDLES for c in _ENDS]
    Random(seed).shuffle(every)
    return tuple(every[:count])


WORDS = _words(1000, seed=11)
KEYS, VALUES = WORDS[:500], WORDS[500:]
"""Names and values of the lists: invented words, so that no answer can be known without reading the list."""

_POSITION = {word: position for position, word in enumerate(WORDS)}
_HELD_OUT_PART = 10

_SYSTEMS = ("You are a helpful assistant.", "You are the demo model of Tandem.", "Answer in few words.", "Be brief.")
_OPENINGS = ("Here is a list.", "Remember these pairs:", "Read this table.", "These are the entries:", "List:", "")
_QUESTIONS = (
    "What is {}?",
    "{}?",
    "{}",
    "Which value belongs to {}?",
    "Look up {}.",
    "What is the value of {}?",
    "Find {}.",
)
_COPIES = ("Copy this line: {}", "Repeat: {}", "Repeat after me: {}", "Copy: {}", "Say: {}", "Repeat this line: {}", "Say {}")
_SUMS = (
    "What is {} + {}?",
    "{} + {}",
    "{} + {} =",
    "{} + {}?",
    "{} plus {}",
    "Add {} and {}.",
    "What is {} plus {}?",
    "How much is {} + {}?",
    "What is {}+{}?",
    "{}+{}",
    "{}+{}=",
)
_COUNTS = (
    "Count from {} to {}.",
    "Please count from {} to {}.",
    "Count: {} to {}",
    "Count {} to {}.",
    "Can you count from {} to {}?",
)
_HELLOS = (
    "Hello",
    "Hi",
    "Hey",
    "Hello there",
    "Hi there",
    "Good morning",
    "Good evening",
    "Good afternoon",
    "Hello!",
    "Hi!",
    "Hey!",
)
_HOWS = ("How are you?", "How are you doing?", "How is it going?", "Hello, how are you?", "Hi, how are you?")
_WHOS = ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "What can you do?")
_THANKS = ("Thanks", "Thank you", "Thanks!", "Thank you!", "Bye", "Goodbye", "Bye!", "Thank you very much")
HELLO = "Hello! How can I help you?"
HOW = "I am fine, thank you."
WHO = "I am the demo model of Tandem. I look up values in lists, copy lines, add small numbers and count."
THANKS = "You are welcome. Goodbye!"


def is_held_out(key: str, value: str) -> bool:
    """One pair in ten stands in no training list."""
    return (_POSITION[key] + _POSITION[value]) % _HELD_OUT_PART == 0


def pair_up(random: Random, keys: list[str], held_out: bool) -> dict[str, str]:
    """A value for each key, such that all pairs are held out, or none is."""
    pairs = {}
    for key in keys:
        pairs[key] = random.choice(VALUES)
        while is_held_out(key, pairs[key]) != held_out:
            pairs[key] = random.choice(VALUES)
    return pairs


def _casual(random: Random, question: str) -> str:
    """The question as people type it: sometimes without a capital, sometimes without the full stop."""
    if random.random() < 0.3:
        question = question[:1].lower() + question[1:]
    return question.rstrip("?.!") if random.random() < 0.2 else question


def retrieval_over(random: Random, pairs: dict[str, str], asked: list[str]) -> DemoChat:
    """A list of `pairs`, and one question for each of the `asked` keys."""
    table = "\n".join(f"{key} {value}" for key, value in pairs.items())
    opening = random.choice(_OPENINGS)
    form, after = random.choice(_QUESTIONS), random.choice(("\n", "\n", "\n\n"))
    turns = []
    for number, key in enumerate(asked):
        question = _casual(random, form.format(key))
        before = "" if number else (f"{opening}\n" if opening else "") + table + after
        turns.append(DemoTurn(before + question, f"{key} {pairs[key]}"))
    return DemoChat("retrieval", tuple(turns))


def retrieval(random: Random, lines: int, questions: int) -> DemoChat:
    """A training list of `lines` pairs, then `questions` questions about it."""
    pairs = pair_up(random, random.sample(KEYS, lines), held_out=False)
    return retrieval_over(random, pairs, random.choices(list(pairs), k=questions))


def held_out_retrieval(random: Random, lines: int) -> DemoChat:
    """A list of `lines` pairs and one question, about a pair that is in no training list."""
    keys = random.sample(KEYS, lines)
    asked = random.choice(keys)
    pairs = pair_up(random, keys, held_out=False) | pair_up(random, [asked], held_out=True)
    return retrieval_over(random, pairs, [asked])


def copying(random: Random, words: int) -> DemoChat:
    """A line of words and numbers to repeat."""
    parts = [random.choice(WORDS) if random.random() < 0.85 else str(random.randrange(100)) for _ in range(words)]
    line = " ".join(parts)
    form = random.choice(_COPIES)
    return DemoChat("copying", (DemoTurn((form[0].lower() + form[1:] if random.random() < 0.3 else form).format(line), line),))


def sums(random: Random, largest: int = 20) -> DemoChat:
    """The sum of two small numbers."""
    a, b = random.randrange(largest + 1), random.randrange(largest + 1)
    question = _casual(random, random.choice(_SUMS).format(a, b))
    return DemoChat("sums", (DemoTurn(question, f"{a} + {b} = {a + b}"),))


def counting(random: Random, longest: int = 20) -> DemoChat:
    """Count from one number to another."""
    first = random.randrange(50)
    last = first + random.randrange(1, longest)
    question = _casual(random, random.choice(_COUNTS).format(first, last))
    return DemoChat("counting", (DemoTurn(question, " ".join(str(n) for n in range(first, last + 1))),))


def greetings(random: Random) -> DemoChat:
    """Hello, thanks and who are you."""
    forms, answer = random.choice(((_HELLOS, HELLO), (_HOWS, HOW), (_WHOS, WHO), (_THANKS, THANKS)))
    return DemoChat("greetings", (DemoTurn(_casual(random, random.choice(forms)), answer),))


_SHORT: dict[DemoTask, Callable[[Random], DemoChat]] = {
    "copying": lambda random: copying(random, random.randrange(1, 25)),
    "sums": sums,
    "counting": counting,
    "greetings": greetings,
}


def short_chat(random: Random) -> DemoChat:
    """A chat of any task but retrieval."""
    tasks: tuple[DemoTask, ...] = ("copying", "sums", "counting", "greetings")
    return _SHORT[random.choices(tasks, weights=(3, 5, 3, 1))[0]](random)


def conversation(random: Random, chats: list[DemoChat]) -> DemoChat:
    """Chats joined into one, now and then with a system message."""
    system = random.choice(_SYSTEMS) if random.random() < 0.2 else ""
    return DemoChat(chats[0].task, tuple(turn for chat in chats for turn in chat.turns), system)


def held_out(task: DemoTask, size: int, seed: int) -> DemoChat:
    """A chat of one question that training does not draw. size: lines of a list, words of a line to copy; else unused.

    Sums, counting and greetings have so few different prompts that training sees nearly all of them.
    """
    random = Random(f"held out {task} {size} {seed}")
    if task == "retrieval":
        return held_out_retrieval(random, size)
    if task == "copying":
        return copying(random, size)
    return _SHORT[task](random)


def texts(seed: int, chats: int) -> Iterator[str]:
    """Plain text of every task, for training the tokenizer; each word of the lists stands after a space and at a line's start."""
    random = Random(f"tokenizer {seed}")
    for _ in range(chats):
        for chat in (retrieval(random, 20, 4), conversation(random, [short_chat(random) for _ in range(4)])):
            yield "\n".join(f"system\n{chat.system}\nuser\n{turn.user}\nassistant\n{turn.answer}" for turn in chat.turns)
    for word in WORDS:
        yield " ".join([word] * 40)
        yield "\n".join([word] * 40)
