"""Processor time of the control process per trajectory, with thousands of groups in flight and without texts.

    python benchmarks/driver_cost.py [--groups 5000] [--tokens 64 256 1024]

The real trainer, workers, rules, buffer, client and fleet run on a modelled engine in virtual time. No call waits, so all
processor time is work, including the checks of the generator's output and the minibatch. The prompt is one token, and no text
is rendered. For each line:

| column | is |
|---|---|
| driver | a run that decodes no response, minus the engine |
| engine | the modelled engine alone, with the same number of concurrent requests of the same lengths |
| decoding | decoding a response of these lengths once, with a small tokenizer; not part of the driver's time |
"""

from __future__ import annotations

import argparse
import asyncio
import time

from skyrl_train.inference.interface import InferenceEngineInput, SamplingParams
from skyrl_train.inference.response_text import text_of
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.runtime.process import gc_tuned
from skyrl_train.simulation.clock import run_in_virtual_time
from skyrl_train.simulation.engine import TRANSPORT, EngineSpeed, ModelledEngine
from skyrl_train.simulation.lengths import log_normal
from skyrl_train.simulation.run import Outcome, Workload, simulate
from skyrl_train.simulation.training import TrainingSpeed
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.update import WeightUpdate

DEPTH = 4


def workload(groups: int, tokens: int, samples: int) -> Workload:
    """Return a workload that has all admitted groups in flight: the trainer is quick, and the engine has enough slots."""
    batch, steps = groups // (DEPTH + 1), 3 * (DEPTH + 1)
    return Workload(
        lengths=log_normal(batch * samples * steps, tokens, 8, 0),
        batch_groups=batch,
        steps=steps,
        engine=EngineSpeed(slots=(DEPTH + 1) * batch * samples, step_s=1.0),
        training=TrainingSpeed(per_step_s=0.1),
        samples=samples,
    )


def run(work: Workload, policy: str) -> Outcome:
    settings = {"max_staleness_steps": 2 * DEPTH, "generate_ahead_steps": DEPTH, "staleness_policy": policy}
    overrides = [f"trainer.fully_async.{name}={value}" for name, value in settings.items()]
    return simulate(work, *overrides, edge=DEPTH + 1)


def of_run_ms(outcome: Outcome) -> float:
    """Return processor milliseconds per trajectory, without the steps at both ends."""
    first, *_, last = outcome.records[outcome.edge - 1 : len(outcome.records) - outcome.edge]
    trajectories = (last.step - first.step) * outcome.workload.batch_groups * outcome.workload.samples
    return 1e3 * (last.processor_s - first.processor_s) / trajectories


async def of_engine_ms(work: Workload) -> float:
    """Return processor milliseconds per response of the modelled engine alone, with a task per request."""
    engine = ModelledEngine(work.engine)
    await engine.start()
    await engine.pause(PauseMode.KEEP)
    await engine.load_weights(WeightUpdate(0, TRANSPORT, "", 0, ()))
    await engine.resume()
    requests = [
        InferenceEngineInput(
            prompt_token_ids=[[5]], sampling_params=SamplingParams(max_tokens=work.lengths[index], ignore_eos=True)
        )
        for index in range(work.engine.slots)
    ]
    began_s = time.process_time()
    for done in asyncio.as_completed([engine.generate(request) for request in requests]):
        await done
    return 1e3 * (time.process_time() - began_s) / len(requests)


def of_decoding_ms(work: Workload) -> float:
    """Return processor milliseconds to decode a response."""
    tokenizer = character_tokenizer("0123456789")
    (token_id,) = tokenizer.encode("0", add_special_tokens=False)
    responses = [[token_id] * work.lengths[index] for index in range(work.engine.slots)]
    began_s = time.process_time()
    for response in responses:
        text_of(tokenizer, response)
    return 1e3 * (time.process_time() - began_s) / len(responses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=5000, help="in flight at once")
    parser.add_argument("--samples", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 256, 1024], help="of a mean response")
    parser.add_argument("--policies", nargs="*", default=["accept", "wait"])
    options = parser.parse_args()
    run(workload(10 * (DEPTH + 1), 16, 1), "accept")  # triggers late imports
    with gc_tuned():  # as the training command does
        print("| groups in flight | samples each | mean tokens | policy | driver | engine | decoding |")
        print("|---|---|---|---|---|---|---|")
        for samples in options.samples:
            for tokens in options.tokens:
                work = workload(options.groups, tokens, samples)
                engine_ms = run_in_virtual_time(lambda loop, work=work: of_engine_ms(work))
                decoding_ms = of_decoding_ms(work)
                for policy in options.policies:
                    outcome = run(work, policy)
                    driver_ms = of_run_ms(outcome) - engine_ms
                    in_flight = max(record.metrics["async/in_flight"] for record in outcome.records)
                    line = f"| {in_flight:,.0f} | {samples} | {tokens} | `{policy}` | **{driver_ms:.2f} ms** |"
                    print(f"{line} {engine_ms:.2f} ms | {decoding_ms:.2f} ms |", flush=True)


if __name__ == "__main__":
    main()
