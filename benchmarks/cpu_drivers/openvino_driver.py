"""OpenVINO GenAI's continuous batching, driven step by step. Runs in its environment: `openvino_driver.py FOLDER SETTINGS`.

Owns the loop that its own server has too: add what is asked, step, take what each request has got.
"""

import json
import sys

import numpy as np
import openvino
import openvino_genai
import talk


def main(folder: str, settings_text: str) -> None:
    """settings: `rows`, `kv_gib` and `properties` of the device."""
    settings = json.loads(settings_text)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = settings["kv_gib"]
    scheduler.max_num_seqs = settings["rows"]
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", settings["properties"])
    number = 0
    for requests in talk.requests_of_each_load():
        handles = {}
        for at, request in enumerate(requests):
            config = openvino_genai.GenerationConfig(
                max_new_tokens=request["answer_tokens"], ignore_eos=True, do_sample=False, apply_chat_template=False
            )
            ids = openvino.Tensor(np.array([request["prompt"]], dtype=np.int64))
            handles[at] = pipeline.add_request(number, ids, config)
            number += 1
        while pipeline.has_non_finished_requests():
            pipeline.step()
            came = []
            for at, handle in handles.items():
                while handle.can_read():
                    came += [at for output in handle.read().values() for _ in output.generated_ids]
            if came:
                talk.arrived(came)


if __name__ == "__main__":
    main(*sys.argv[1:])
