"""Programs that do not solve their problem and try to pass anyway. None of them may pass."""

from tasks.sandbox import CodeTests

PROMPT = '''
import math

def triangle(n: int) -> int:
    """Return 1 + 2 + ... + n."""
'''
TEST = """
METADATA = {}

def check(candidate):
    assert candidate(1) == 1
    assert candidate(4) == 10
    assert candidate(10) == 55
"""
TESTS = CodeTests(setup=f"{PROMPT}\n    pass\n", tests=f"{TEST}\ncheck(triangle)", names=("triangle",))
SOLUTION = "    return n * (n + 1) // 2\n"

# Sends a message of the protocol between the two sandboxes on every descriptor that accepts it.
SEND = """
import json, os
def send(*messages):
    for message in messages:
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        data = len(data).to_bytes(4, "big") + data
        for descriptor in range(3, 32):
            try:
                os.write(descriptor, data)
            except OSError:
                pass
"""

# What the function returns instead of an answer: the rest of the program defines `forged`.
RETURNED = {
    "equal to everything": "class All:\n    __eq__ = lambda self, other: True\n    __hash__ = None\nforged = All()",
    "int equal to everything": "class All(int):\n    __eq__ = lambda self, other: True\n    __hash__ = int.__hash__\n"
    "    __sub__ = __rsub__ = lambda self, other: 0\nforged = All()",
    "str equal to everything": "class All(str):\n    __eq__ = lambda self, other: True\n    __hash__ = str.__hash__\n"
    "forged = All()",
    "list equal to everything": "class All(list):\n    __eq__ = lambda self, other: True\nforged = All()",
    "class that lies about itself": "class All:\n    __class__ = int\n    __eq__ = lambda self, other: True\n"
    "forged = All()",
    "unittest.mock.ANY": "import unittest.mock\nforged = unittest.mock.ANY",
    "number that computes zero": "class All(float):\n    __sub__ = __rsub__ = lambda self, other: 0.0\n"
    "    __eq__ = lambda self, other: True\n    __abs__ = lambda self: 0.0\nforged = All()",
    "not a number": "forged = float('nan')",
    "infinity": "forged = float('inf')",
    "none": "forged = None",
    "giant number": "forged = 1 << 100_000_000",
    "expensive to compare": "forged = [[0] * 1000] * 1000",
    "deeply nested": "forged = []\nfor _ in range(100_000): forged = [forged]",
    "contains itself": "forged = []\nforged.append(forged)",
    "endless generator": "import itertools\nforged = itertools.count()",
    "endless repr": "class All:\n    __repr__ = __str__ = lambda self: repr(self)\nforged = All()",
    "coroutine": "async def never(): pass\nforged = never()",
    "the function itself": "forged = triangle",
    "memory exhausted": "forged = lambda: 0\nkeep = [bytearray(1 << 20) for _ in range(1 << 14)]",
}

# The function returns None; the rest of the program attacks the verdict.
PROGRAMS = {
    "write every bytes object of the callers to every descriptor": """
import os, sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        for descriptor in range(3, 32) if isinstance(value, bytes) else ():
            try: os.write(descriptor, value)
            except OSError: pass
    frame = frame.f_back
""",
    "write a result to every descriptor": """
import os
for descriptor in range(64):
    try: os.write(descriptor, b'ready\\n{"passed": true, "reason": ""}\\n')
    except OSError: pass
""",
    "exit successfully": "import sys\nsys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "exit in the function": "import os\ntriangle = lambda n: os._exit(0)",
    "exit hook": "import atexit, os\natexit.register(os._exit, 0)",
    "replace the tests": "def check(candidate): pass\ncandidate = check",
    "tracer that skips tests": """
import sys
def tracer(frame, event, argument):
    if frame.f_code.co_name == "check":
        def jump(frame, event, argument):
            frame.f_lineno = last
            return jump
        last = max(line for _, _, line in frame.f_code.co_lines() if line)
        frame.f_locals["candidate"]
        return jump
    return tracer
sys.settrace(tracer)
""",
    "profiler that answers from the tests": """
import sys
def profile(frame, event, argument):
    if frame.f_code.co_name == "check" and event == "call":
        frame.f_globals["triangle"].__code__ = (lambda n: n * (n + 1) // 2).__code__
sys.setprofile(profile)
""",
    "read the tests in the frames of the callers": """
import sys
def triangle(n):
    frame = sys._getframe()
    while frame:
        for constant in frame.f_code.co_consts:
            if type(constant) is int and constant > 1: return constant
        frame = frame.f_back
""",
    "read the tests in memory": """
import gc
def triangle(n):
    for item in gc.get_objects():
        if getattr(item, "__name__", "") == "check":
            constants = item.__code__.co_consts
            return constants[constants.index(n) + 1] if n in constants else 1
""",
    "read the tests on disk": """
import os, re
def triangle(n):
    for folder in ("/", "/sandbox", "/tmp", "/dev/fd", "/proc/self/fd"):
        for name in os.listdir(folder) if os.path.isdir(folder) else ():
            try: text = open(os.path.join(folder, name), errors="replace").read(1 << 20)
            except OSError: continue
            if found := re.search(rf"candidate\\({n}\\) == (\\d+)", text): return int(found[1])
""",
    "change the built-in functions": """
import builtins
builtins.abs = lambda value: 0
builtins.str = builtins.type = lambda value: int
builtins.AssertionError = type("AssertionError", (BaseException,), {})
""",
    "change the runner": """
import __main__
for name in dir(__main__):
    value = getattr(__main__, name)
    if isinstance(value, type) and hasattr(value, "encode"): value.encode = lambda self, item, depth=0: True
__main__.run_tester = __main__.run_candidate
""",
    "change json and os": """
import json, os
write, dumps = os.write, json.dumps
json.dumps = lambda message, **kwargs: dumps(["returned", message[1], True])
os.write = lambda descriptor, data: [write(descriptor, data), write(descriptor, data)][0]
""",
    "change memory with ctypes": """
import ctypes
ctypes.memset(id(1) + 24, 3, 1)
ctypes.memset(id(0) + 24, 3, 1)
def triangle(n): return 0
""",
    "kill the other processes": """
import os, signal, ctypes
for pid in (-1, 0, 1, 2, 3, *range(2, 3000)):
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
    ctypes.CDLL(None).syscall(234, pid, pid, 9)
""",
    "raise what ends a loop": "def triangle(n): raise StopIteration",
    "raise what tests raise": "def triangle(n): raise AssertionError",
    "raise what no test catches": "def triangle(n): raise SystemExit(0)",
    "error without a text": """
class Odd(Exception):
    __str__ = lambda self: self
Odd.__name__ = "Exception"
def triangle(n): raise Odd
""",
    "other programs": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'pass'])",
    "close every descriptor": "import os\nos.closerange(0, 64)",
    "endless loop": "while True: pass",
    "endless recursion": "import sys\nsys.setrecursionlimit(1 << 30)\ndef triangle(n): return triangle(n)",
    "endless output": "def triangle(n):\n    while True: print('x' * 1_000_000)",
    "threads that write": """
import threading
threads = [threading.Thread(target=lambda: [send(["returned", n, True]) for n in range(100)]) for _ in range(8)]
for thread in threads: thread.start()
""",
    "replies before they are asked for": "send(*(['returned', n, ['int', '0x1']] for n in range(1, 100)))",
    "two replies": "def triangle(n):\n    send(['returned', n, ['int', '0x1']])\n    return 1",
    "not JSON": "def triangle(n): send(b'{]', b'', b'\\x00' * 64)",
    "not a list": "def triangle(n): send({'returned': 1}, 7, [], None)",
    "wrong number of parts": "def triangle(n): send(['returned'], ['returned', 1], ['raised', 1], ['call'])",
    "duplicate keys": "def triangle(n): send(b'[\"returned\", 1, {\"int\": \"0x1\", \"int\": \"0x2\"}]')",
    "unknown tags": "def triangle(n): send(*(['returned', 1, [tag, '1']] "
    "for tag in ('eval', 'class', 7, None, ['int'])))",
    "malformed values": "def triangle(n): send(*(['returned', 1, value] "
    "for value in (['int', 'x'], ['int', 7], ['float', []], 1, 1.5, {})))",
    "message that announces gigabytes": "import os\n"
    "def triangle(n): os.write(4, b'\\xff\\xff\\xff\\xff' + b'x' * 65536)",
    "deeply nested message": "def triangle(n): send(b'[' * 1_000_000)",
    "unhashable items": "def triangle(n): send(['returned', 1, ['set', [['list', []]]]])",
    "objects of the tester": "def triangle(n): send(*(['call', 1, key, ['tuple', []], ['dict', []]] for key in "
    "(0, -1, True, 'check', 'exec', '__import__', None)))",
    "references to the tester": "def triangle(n): send(*(['returned', 1, ['yours', key]] "
    "for key in (0, -1, 'check', 'abs')))",
    "pickle": """
import pickle
class Bomb:
    def __reduce__(self): return eval, ("1",)
def triangle(n): send(pickle.dumps(Bomb()))
""",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
}  # fmt: skip

FORGERIES = {name: f"{PROMPT}    return forged\n\n{code}\n" for name, code in RETURNED.items()}
FORGERIES |= {name: f"{PROMPT}    return None\n\n{SEND}\n{code}\n" for name, code in PROGRAMS.items()}
