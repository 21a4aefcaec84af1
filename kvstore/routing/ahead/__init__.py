"""Memory beyond a decision: blocks on their way, pins, sessions.

| module         | cares about                                     | in → out            |
|----------------|-------------------------------------------------|---------------------|
| `preparations` | blocks brought to dram before an engine asks    | held, hot → Prepare |
| `pins`         | clients' pins; the last worker of each session  | hints → Prepare     |
"""
