"""The small world of the demo, as text: services, namespaces, and people who ask for things to be done to them.

Two things are drawn from it, both functions of a seed alone: the text that the demo's base model is pre-trained on
(`pretraining_pieces`), and the task it is then fine-tuned for (`task_rows`): a request in English in, one kubectl
command out. The pre-training text answers the same requests in prose. It names the parts of commands and never holds a
whole one of the task, so the base model understands the requests and cannot do the task. Training is
make_demo_model.py's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SERVICES = (
    "cart checkout catalog search billing invoices payments refunds orders shipping tracking returns accounts login "
    "sessions profiles avatars gateway router proxy cache queue mailer notifier scheduler reports metrics alerts audit "
    "exports imports backups uploads images videos thumbnails comments reviews ratings recommender pricing discounts "
    "coupons inventory warehouse suppliers courier maps weather translator chatbot feedback surveys calendar bookings "
    "tickets events streams archive wallet ledger"
).split()
NAMESPACES = "staging production testing preview sandbox canary demo nightly".split()
PEOPLE = "Mira Jonas Aiko Tomas Lena Omar Ruth Ivan Nadia Paul Sofia Hugo".split()


@dataclass(frozen=True)
class Intent:
    """One thing that can be asked for: how people ask, how the base model answers in prose, and the command."""

    requests: tuple[str, ...]
    prose: tuple[str, ...]
    command: str
    draw: Callable[[random.Random], dict[str, str]] = lambda rng: {}


def _number(low: int, high: int) -> Callable[[random.Random], dict[str, str]]:
    return lambda rng: {"n": str(rng.randint(low, high))}


def _one_of(*values: str) -> Callable[[random.Random], dict[str, str]]:
    return lambda rng: {"n": rng.choice(values)}


def _version(rng: random.Random) -> dict[str, str]:
    return {"n": f"{rng.randint(1, 9)}.{rng.randint(0, 40)}"}


INTENTS = (
    Intent(
        (
            "Scale {s} in {ns} to {n} replicas.",
            "We need {n} copies of {s} in {ns}.",
            "Can you run {s} with {n} replicas in {ns}?",
            "Please bring {s} up to {n} pods in {ns}.",
            "In {ns}, {s} should have {n} replicas.",
        ),
        ("I will run {n} copies of {s} in {ns}.", "{s} in {ns} will have {n} replicas."),
        "kubectl scale deployment {s} --replicas={n} -n {ns}",
        _number(2, 40),
    ),
    Intent(
        (
            "Restart {s} in {ns}.",
            "Please bounce {s} in {ns}.",
            "Since {s} in {ns} hangs, give it a restart.",
            "Can you restart all pods of {s} in {ns}?",
            "In {ns}, start {s} afresh.",
        ),
        ("I will restart {s} in {ns}.", "{s} in {ns} will start afresh."),
        "kubectl rollout restart deployment {s} -n {ns}",
    ),
    Intent(
        (
            "Show me the last {n} lines that {s} logged in {ns}.",
            "What did {s} in {ns} say? {n} lines are enough.",
            "I want {n} log lines of {s} from {ns}.",
            "Get the newest {n} log lines of {s} in {ns}.",
            "In {ns}, print {n} lines of the log of {s}.",
        ),
        (
            "I will show {n} log lines of {s} from {ns}.",
            "Here are {n} lines that {s} logged in {ns}.",
        ),
        "kubectl logs deployment/{s} --tail={n} -n {ns}",
        _number(5, 99),
    ),
    Intent(
        (
            "Roll {s} in {ns} back.",
            "Undo the last release of {s} in {ns}.",
            "The new {s} in {ns} is broken, go back to the one before.",
            "Please revert {s} in {ns}.",
            "In {ns}, return {s} to the release before.",
        ),
        (
            "I will take {s} in {ns} back to the release before.",
            "{s} in {ns} will return to its last release.",
        ),
        "kubectl rollout undo deployment {s} -n {ns}",
    ),
    Intent(
        (
            "Move {s} in {ns} to version {n}.",
            "Deploy {s} {n} to {ns}.",
            "Please upgrade {s} in {ns} to {n}.",
            "Release version {n} of {s} in {ns}.",
            "In {ns}, {s} should be at version {n}.",
        ),
        ("I will move {s} in {ns} to version {n}.", "{s} in {ns} will be at version {n}."),
        "kubectl set image deployment/{s} {s}={s}:{n} -n {ns}",
        _version,
    ),
    Intent(
        (
            "Is {s} in {ns} ready yet?",
            "How far is the release of {s} in {ns}?",
            "Tell me when {s} is up in {ns}.",
            "Watch {s} in {ns} until it is ready.",
            "In {ns}, did {s} come up?",
        ),
        ("I will tell you when {s} in {ns} is ready.", "I will watch {s} in {ns} until it is up."),
        "kubectl rollout status deployment {s} -n {ns}",
    ),
    Intent(
        (
            "Give {s} in {ns} at most {n} of memory.",
            "Limit the memory of {s} in {ns} to {n}.",
            "Let {s} in {ns} use {n} of memory, no more.",
            "Please cap {s} at {n} of memory in {ns}.",
            "In {ns}, hold {s} to {n} of memory.",
        ),
        ("I will limit {s} in {ns} to {n} of memory.", "{s} in {ns} will get {n} of memory."),
        "kubectl set resources deployment {s} --limits=memory={n} -n {ns}",
        _one_of(
            "128Mi", "256Mi", "384Mi", "512Mi", "768Mi", "1Gi", "2Gi", "3Gi", "4Gi", "6Gi", "8Gi"
        ),
    ),
    Intent(
        (
            "Open port {n} here to {s} in {ns}.",
            "I want to reach {s} of {ns} on my port {n}.",
            "Forward {n} to {s} in {ns}.",
            "Let me talk to {s} in {ns} through port {n}.",
            "In {ns}, connect {s} to my port {n}.",
        ),
        ("I will open port {n} to {s} in {ns}.", "You will reach {s} of {ns} on port {n}."),
        "kubectl port-forward service/{s} {n}:80 -n {ns}",
        _number(1025, 9999),
    ),
)

OPENINGS = ("Sure.", "Of course.", "With pleasure.", "Gladly.", "All right.")
# The opening that the demo's pairs prefer.
PREFERRED = "Of course."

NOTES = (
    "At {h}:{m} {p} saw that {s} in {ns} was slow. {p} told {q}, and {q} looked at it until {h2}:{m}.",
    "{p} wrote {s} and {q} wrote {s2}. {s} calls {s2} {n} times an hour.",
    "In {ns} there are {n} pods of {s} and {n2} pods of {s2}. {p} counted the pods of {s} and found {n}.",
    "The release of {s} in {ns} took {n} minutes; the release of {s2} took {n2}. {s} was done after {n} minutes.",
    "{p} asked {q} about {s} in {ns}. {q} said that {s} in {ns} is fine, and that {s2} is not.",
    "A deployment keeps the pods of a service such as {s} running. A namespace such as {ns} keeps services apart.",
    "With kubectl one can scale, set, rollout, logs and port-forward; {p} likes the rollout of {s} best.",
    "The image {s}:{v} was built by {p} on {d}. On {d} {q} tried {s}:{v} and found it good.",
    "kubectl rollout knows restart, undo and status. kubectl set knows image and resources. {q} told {p} on {d}.",
)
QUESTIONS = (
    ("Say it again: {s}, {ns}, {n}.", "{s}, {ns}, {n}."),
    ("{p} looks after {s} and {q} after {s2}. Who looks after {s2}?", "{q} looks after {s2}."),
    (
        "{p} has {n} pods of {s} in {ns}. How many pods of {s}?",
        "There are {n} pods of {s} in {ns}.",
    ),
    ("Spell the namespace of {s}, which is {ns}.", "It is {ns}."),
    ("What is the deployment of {s} called?", "deployment {s}"),
    ("And how with a slash, {s}?", "deployment/{s}"),
    ("How do I name {s} in {ns}?", "deployment {s} -n {ns}"),
    ("Where do I find {s} from port {n}?", "service/{s} {n}:80"),
    ("What is the image of {s} at version {v}?", "{s}={s}:{v}"),
    ("Which flag stands for {n2} replicas?", "--replicas={n2}"),
    ("Which flag stands for {n2} lines?", "--tail={n2}"),
    ("Which flag stands for {n2}Mi of memory?", "--limits=memory={n2}Mi"),
    ("Which flag stands for the namespace {ns}?", "-n {ns}"),
    ("Good morning, I am {p}.", "Good morning, {p}. What can I do for you?"),
    ("Thank you for {s}.", "You are welcome."),
)
WORDS = (*SERVICES, *NAMESPACES, *PEOPLE)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()


def is_held_out(service: str, namespace: str) -> bool:
    """True if a service in a namespace is kept for the held-out requests: a quarter of all pairs, some of each."""
    return (SERVICES.index(service) + NAMESPACES.index(namespace)) % 4 == 0


def fill_request(
    rng: random.Random, intent: Intent, service: str, namespaces: Sequence[str] = NAMESPACES
) -> tuple[str, str, str]:
    """Draw one (request, prose answer, command) of an intent for one service."""
    slots = {"s": service, "ns": rng.choice(namespaces), **intent.draw(rng)}
    request, prose = rng.choice(intent.requests), rng.choice(intent.prose)
    return request.format(**slots), prose.format(**slots), intent.command.format(**slots)


def note_slots(rng: random.Random) -> dict[str, str]:
    (s, s2), (p, q) = rng.sample(SERVICES, 2), rng.sample(PEOPLE, 2)
    hour = rng.randint(0, 22)
    slots = {"s": s, "s2": s2, "p": p, "q": q, "ns": rng.choice(NAMESPACES), "d": rng.choice(DAYS)}
    numbers = {"n": rng.randint(2, 9999), "n2": rng.randint(2, 99), "h": hour, "h2": hour + 1}
    slots |= {name: str(number) for name, number in numbers.items()}
    return {**slots, "m": f"{rng.randint(0, 59):02d}", "v": _version(rng)["n"]}


def draw_echo(rng: random.Random) -> tuple[str, str]:
    """Draw some words and numbers to repeat, and the same again."""
    length = rng.randint(2, 7)
    words = " ".join(
        rng.choice(WORDS) if rng.random() < 0.6 else _any_number(rng) for _ in range(length)
    )
    return f"Say it again: {words}", words


def _any_number(rng: random.Random) -> str:
    return rng.choice((str(rng.randint(2, 99)), str(rng.randint(100, 9999)), _version(rng)["n"]))


def draw_piece(rng: random.Random) -> tuple[str, str]:
    """Draw a piece of the world: a (question, answer) in prose, or a note, which answers no question."""
    kind = rng.random()
    if kind < 0.1:
        return "", rng.choice(NOTES).format(**note_slots(rng))
    if kind < 0.2:
        return draw_echo(rng)
    if kind < 0.55:
        slots = note_slots(rng)
        question, answer = rng.choice(QUESTIONS)
        return question.format(**slots), answer.format(**slots)
    request, prose, _ = fill_request(rng, rng.choice(INTENTS), rng.choice(SERVICES))
    return request, f"{rng.choice(OPENINGS)} {prose}"


def pretraining_pieces(seed: int, echoes: int, pieces: int) -> list[tuple[str, str]]:
    """Return echoes, then the mixture: what can repeat what it read learns the rest in a fraction of the time."""
    rng = random.Random(seed)
    return [draw_echo(rng) for _ in range(echoes)] + [draw_piece(rng) for _ in range(pieces)]


def preference_rows(seed: int, count: int) -> list[dict[str, list[dict[str, str]]]]:
    """Return `count` pairs of prose answers to requests of the task, which differ in how they open."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        service = rng.choice(SERVICES)
        namespaces = [namespace for namespace in NAMESPACES if not is_held_out(service, namespace)]
        request, prose, _ = fill_request(rng, INTENTS[number % len(INTENTS)], service, namespaces)
        other = rng.choice([opening for opening in OPENINGS if opening != PREFERRED])
        answers = {"chosen": f"{PREFERRED} {prose}", "rejected": f"{other} {prose}"}
        sides = {
            "prompt": ("user", request),
            **{name: ("assistant", text) for name, text in answers.items()},
        }
        rows.append({key: [{"role": role, "content": text}] for key, (role, text) in sides.items()})
    return rows


def task_rows(seed: int, count: int, held_out: bool) -> list[dict[str, list[dict[str, str]]]]:
    """Return `count` different chats of the task, the intents in turn: a request, and its command as the answer.

    No service stands in the same namespace in the held-out rows and in the others.
    """
    rng = random.Random(seed)
    commands: dict[str, str] = {}
    while len(commands) < count:
        service = rng.choice(SERVICES)
        namespaces = [
            namespace for namespace in NAMESPACES if is_held_out(service, namespace) == held_out
        ]
        request, _, command = fill_request(
            rng, INTENTS[len(commands) % len(INTENTS)], service, namespaces
        )
        commands.setdefault(request, command)
    return [
        {
            "messages": [
                {"role": "user", "content": request},
                {"role": "assistant", "content": command},
            ]
        }
        for request, command in commands.items()
    ]
