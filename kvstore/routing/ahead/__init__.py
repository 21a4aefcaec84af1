"""Memory beyond a decision: blocks on their way, pins, sessions.

| module         | cares about                                     | in → out            |
|----------------|-------------------------------------------------|---------------------|
| `preparations` | blocks brought to dram before an engine asks    | held, hot → Prepare |
| `pins`         | clients' pins, touched again and again          | hints → Prepare     |
| `stays`        | pool and worker of each session's last request  | session → worker    |
"""
