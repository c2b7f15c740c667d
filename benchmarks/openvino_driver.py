"""OpenVINO GenAI's continuous batching, driven step by step: `openvino_driver.py MODEL SETTINGS LOAD...`, of `cpu_peers.py`.

Owns the loop that its own server has too: add what is asked, step, take what each request has got. It runs in OpenVINO's own
environment, so it imports nothing of Tandem. A load is a file with a line of JSON for each request. For each load it reports when
it began and when each token of each request came, as a line of JSON on the pipe that `common/processes/child.py` opens. Then it
stays until its parent has looked at its memory.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import openvino
import openvino_genai


def main(model: str, settings_text: str, *loads: str) -> None:
    """settings: `rows`, `kv_gib` and `properties` of the device."""
    settings = json.loads(settings_text)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = settings["kv_gib"]
    scheduler.max_num_seqs = settings["rows"]
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", settings["properties"])
    orders, reports = os.fdopen(int(os.environ["TANDEM_ORDER_FD"])), os.fdopen(int(os.environ["TANDEM_REPORT_FD"]), "w")
    for load in loads:
        began_s, handles = time.perf_counter(), []
        for number, line in enumerate(Path(load).read_text().splitlines()):
            request = json.loads(line)
            config = openvino_genai.GenerationConfig(
                max_new_tokens=request["output_tokens"], ignore_eos=True, do_sample=False, apply_chat_template=False
            )
            ids = openvino.Tensor(np.array([request["prompt"]], dtype=np.int64))
            handles.append(pipeline.add_request(number, ids, config))
        tokens_s: list[list[float]] = [[] for _ in handles]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now_s = time.perf_counter()
            for handle, times in zip(handles, tokens_s, strict=True):
                while handle.can_read():
                    times += [now_s for output in handle.read().values() for _ in output.generated_ids]
        print(json.dumps({"began_s": began_s, "tokens_s": tokens_s}), file=reports, flush=True)
    orders.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
