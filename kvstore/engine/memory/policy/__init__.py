"""Order of evictions from dram, and choice of blocks for the disk.

| module      | cares about                                      | in → out                      |
|-------------|--------------------------------------------------|-------------------------------|
| `port.py`   | the contract of policies                         | –                             |
| `choose.py` | policies by name                                 | name → policy                 |
| `lru.py`    | least recently used, the default                 | uses → victims                |
| `reuse.py`  | the same, with less time for blocks used once    | uses → victims                |
| `expected.py` | places kept for blocks that a request named   | keys → places                 |
| `disk.py`   | second sight, and a budget of bytes a day        | prints → mask; count → count  |

A new policy implements `port.Policy`, gets its name in `choose.POLICIES`, and so runs the contract
suite and the engine's state machine.
"""
