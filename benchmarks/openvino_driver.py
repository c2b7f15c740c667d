"""OpenVINO GenAI's continuous batching, driven step by step: `openvino_driver.py FOLDER SETTINGS`, started by `cpu_peers.py`.

Owns the loop that its own server has too: add what is asked, step, take what each request has got. It runs in OpenVINO's own
environment, so it imports nothing of Tandem; it reads loads and reports tokens over the pipes that `common/processes/child.py`
opens, each as a line of JSON. A report of no requests says that it is ready for the next load.
"""

import json
import os
import sys
from typing import TextIO

import numpy as np
import openvino
import openvino_genai


def main(folder: str, settings_text: str) -> None:
    """settings: `rows`, `kv_gib` and `properties` of the device."""
    settings = json.loads(settings_text)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = settings["kv_gib"]
    scheduler.max_num_seqs = settings["rows"]
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", settings["properties"])
    orders, reports = os.fdopen(int(os.environ["TANDEM_ORDER_FD"])), os.fdopen(int(os.environ["TANDEM_REPORT_FD"]), "w")
    number = 0
    report(reports, [])
    for line in orders:
        load, handles = json.loads(line), []
        for prompt, answer_tokens in zip(load["prompts"], load["answer_tokens"], strict=True):
            config = openvino_genai.GenerationConfig(
                max_new_tokens=answer_tokens, ignore_eos=True, do_sample=False, apply_chat_template=False
            )
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(pipeline.add_request(number, ids, config))
            number += 1
        while pipeline.has_non_finished_requests():
            pipeline.step()
            arrived = []
            for at, handle in enumerate(handles):
                while handle.can_read():
                    arrived += [at for output in handle.read().values() for _ in output.generated_ids]
            if arrived:
                report(reports, arrived)
        report(reports, [])


def report(reports: TextIO, requests: list[int]) -> None:
    """A token came for each of these requests."""
    print(json.dumps({"requests": requests}), file=reports, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
