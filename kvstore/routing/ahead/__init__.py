"""State that outlives a decision: prefetches on their way, pins, sessions.

| module         | cares about                                     | in → out            |
|----------------|-------------------------------------------------|---------------------|
| `preparations` | blocks brought to dram before an engine asks    | held, hot → Prepare |
| `pins`         | clients' pins; the last worker of each session  | hints → Prepare     |
"""
