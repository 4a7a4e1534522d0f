"""Write four tasks for an agent with a shell, in the format of Harbor: "write this digit to the file answer".

python make_tasks.py FOLDER
"""

import sys
from pathlib import Path

TASK = """\
version = "1.0"

[agent]
timeout_sec = 10.0

[verifier]
timeout_sec = 10.0

[environment]
network_mode = "no-network"
"""
DOCKERFILE = """\
FROM debian:bookworm-slim
WORKDIR /app
"""
# A file is worth a little and another digit more, so that a model without any training finds its way.
TEST = """\
#!/bin/bash
reward=0
if [ -s answer ]; then reward=0.1; fi
if grep -qx '[0-3]' answer; then reward=0.3; fi
if [ "$(cat answer)" = {digit} ]; then reward=1; fi
echo $reward > /logs/verifier/reward.txt
"""


def write_tasks(folder: Path) -> None:
    for digit in range(4):
        files = {
            "task.toml": TASK,
            "instruction.md": f"{digit}\n",
            "environment/Dockerfile": DOCKERFILE,
            "solution/solve.sh": f"#!/bin/bash\necho {digit} > answer\n",
            "tests/test.sh": TEST.format(digit=digit),
        }
        for name, text in files.items():
            path = folder / f"write-{digit}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    write_tasks(Path(sys.argv[1]))
