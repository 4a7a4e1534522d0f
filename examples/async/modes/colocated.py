"""The quickstart's task for one device that generation and training use in turns.

Engines sleep while the policy trains; the training state is in main memory while they generate (on a CPU: in files). On a
GPU, add trainer.device=cuda generator.inference_engine.device=cuda.

./uvw run examples/async/modes/colocated.py [key=value ...]
"""

import sys

import skyrl_train

MODE = ["trainer.mode=sync", "trainer.placement.colocate_all=true", "trainer.run_name=colocated"]
skyrl_train.train("quickstart", overrides=[*MODE, *sys.argv[1:]])
