"""A real vLLM engine in a process of its own, driven over a socket by tests/engine/processes.py.

One JSON line in, one JSON line out. Usage: engine_main.py FD OPTIONS (LLM's keyword arguments, as JSON).
"""

from __future__ import annotations

import ctypes
import itertools
import json
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from vllm import LLM, SamplingParams

SCHEDULER_CALLS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
)


class ScheduleClock:
    """The longest schedule(), and the longest time that one spent in the connector."""

    def __init__(self, scheduler: Any) -> None:
        self.longest_schedule_s = 0.0
        self.longest_connector_s = 0.0
        self._connector_s = 0.0
        schedule = scheduler.schedule
        if scheduler.connector is not None:
            for name in SCHEDULER_CALLS:
                setattr(scheduler.connector, name, self._timed(getattr(scheduler.connector, name)))

        def timed_schedule(*args: Any, **kwargs: Any) -> Any:
            self._connector_s = 0.0
            start_s = time.monotonic()
            answer = schedule(*args, **kwargs)
            self.longest_schedule_s = max(self.longest_schedule_s, time.monotonic() - start_s)
            self.longest_connector_s = max(self.longest_connector_s, self._connector_s)
            return answer

        scheduler.schedule = timed_schedule

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = time.monotonic()
            try:
                return method(*args, **kwargs)
            finally:
                self._connector_s += time.monotonic() - start_s

        return timed


class LoadSpoiler:
    """The negative control: once told to, overwrites with zeros whatever a load brought for one group."""

    def __init__(self) -> None:
        from kvmosaic.engines.copying import Copier

        self.group: int | None = None
        self.num_pages = 0
        load = Copier.load

        def spoiling_load(copier: Any, plan: Any, stop: Any) -> bool:
            done = load(copier, plan, stop)
            groups = copier._geometry.object_groups[plan.object_group].groups
            for group, ids in zip(groups, plan.block_ids, strict=True):
                if group == self.group:
                    self._zero(copier._pages[group], ids)
            return done

        Copier.load = spoiling_load  # type: ignore[method-assign]

    def _zero(self, pages: Any, ids: Any) -> None:
        for block_id in ids.ravel().tolist():
            if block_id:
                self.num_pages += 1
                for address, stride, length in zip(pages.addresses, pages.strides, pages.lengths, strict=True):
                    ctypes.memset(int(address + stride * block_id), 0, int(length))


class Host:
    """The engine and what a test may do with it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.spoiler = LoadSpoiler() if "kv_transfer_config" in options else None
        self.llm = LLM(**options)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.clock = ScheduleClock(self.scheduler)
        self.numbers = itertools.count()
        self.unfinished: set[str] = set()
        self.answers: dict[str, dict[str, Any]] = {}
        self.prefill: dict[str, Any] = {}
        self.num_preemptions = 0
        self._watch_outputs()

    def submit(
        self,
        prompts: list[list[int]],
        salts: list[str] | None = None,
        max_tokens: int = 3,
        stop: str | None = None,
        logprobs: int = -1,
    ) -> list[str]:
        names = []
        for prompt, salt in zip(prompts, salts or [None] * len(prompts), strict=True):
            name = f"request-{next(self.numbers)}"
            given: dict[str, Any] = {"prompt_token_ids": prompt}
            if salt is not None:
                given["cache_salt"] = salt
            params = SamplingParams(
                temperature=0.0, max_tokens=max_tokens, logprobs=logprobs, ignore_eos=True, stop=stop
            )
            self.engine.add_request(name, given, params)
            self.unfinished.add(name)
            names.append(name)
        return names

    def step(self, count: int = 1) -> int:
        """Step so often, or until nothing is left to do; how many requests are unfinished."""
        for _ in range(count):
            if not self.scheduler.has_requests():
                break
            for output in self.engine.step():
                if output.finished:
                    self.unfinished.discard(output.request_id)
                    self.answers[output.request_id] = self._answer(output)
        return len(self.unfinished)

    def drain(self, names: list[str], deadline_s: float = 120.0) -> list[dict[str, Any] | None]:
        """Step until nothing is left to do; the answers to the named requests, None for aborted ones."""
        end_s = time.monotonic() + deadline_s
        while self.scheduler.has_requests():
            self.step()
            if time.monotonic() > end_s:
                raise TimeoutError(f"requests unfinished after {deadline_s} s: {sorted(self.unfinished)}")
        return [self.answers.pop(name, None) for name in names]

    def run(self, **request: Any) -> list[dict[str, Any] | None]:
        return self.drain(self.submit(**request))

    def abort(self, names: list[str]) -> None:
        self.engine.abort_request(names)
        self.unfinished -= set(names)

    def drop_local(self) -> bool:
        return self.engine.reset_prefix_cache()

    def clear_external(self) -> bool:
        return self.engine.reset_prefix_cache(reset_connector=True)

    def spoil(self, group: int | None) -> int:
        """Zero this group in the loads to come; how many pages were zeroed since the last call."""
        assert self.spoiler is not None
        self.spoiler.group, num_pages, self.spoiler.num_pages = group, self.spoiler.num_pages, 0
        return num_pages

    def state(self) -> dict[str, Any]:
        config = self.scheduler.kv_cache_config
        connector = sys.modules.get("kvmosaic.engines.vllm.connector")
        return {
            "free_blocks": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "groups": [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups],
            "block_tokens": [group.kv_cache_spec.block_size for group in config.kv_cache_groups],
            "budget_tokens": self.scheduler.max_num_scheduled_tokens,
            "num_preemptions": self.num_preemptions,
            "faults": dict(connector.faults) if connector else {},
            "longest_schedule_s": self.clock.longest_schedule_s,
            "longest_connector_s": self.clock.longest_connector_s,
        }

    def reset_clock(self) -> None:
        self.clock.longest_schedule_s = self.clock.longest_connector_s = 0.0

    def close(self) -> None:
        self.engine.engine_core.shutdown()

    def _watch_outputs(self) -> None:
        """vLLM's Python interface adds up local and external hits; its engine reports them apart."""
        get_output = self.engine.engine_core.get_output

        def watched() -> Any:
            outputs = get_output()
            for output in outputs.outputs:
                if output.prefill_stats is not None:
                    self.prefill[output.request_id.rpartition("-")[0]] = output.prefill_stats
            return outputs

        self.engine.engine_core.get_output = watched
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num_preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted

    def _answer(self, output: Any) -> dict[str, Any]:
        completion = output.outputs[0]
        stats = self.prefill.pop(output.request_id, None)
        return {
            "tokens": list(completion.token_ids),
            "logprobs": [[row[k].logprob for k in sorted(row)] for row in completion.logprobs or ()],
            "local": stats.num_local_cached_tokens if stats else 0,
            "external": stats.num_external_cached_tokens if stats else 0,
            "finish": completion.finish_reason,
        }


def main(fd: int, options: dict[str, Any]) -> None:
    with socket.socket(fileno=fd) as link, link.makefile("rw") as lines:

        def reply(**content: Any) -> None:
            lines.write(json.dumps(content) + "\n")
            lines.flush()

        host = Host(options)
        verbs: dict[str, Callable[..., Any]] = {
            "submit": host.submit,
            "step": host.step,
            "drain": host.drain,
            "run": host.run,
            "abort": host.abort,
            "drop_local": host.drop_local,
            "clear_external": host.clear_external,
            "spoil": host.spoil,
            "state": host.state,
            "reset_clock": host.reset_clock,
        }
        reply(answer="ready")
        for line in lines:
            call = json.loads(line)
            try:
                reply(answer=verbs[call.pop("verb")](**call))
            except Exception as error:
                reply(error=repr(error))
        host.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
