"""What a push asks of one engine, from its pause to its resume, in as few messages as may be.

A message to an engine in another process takes a millisecond. So calls that nobody waits for are kept in
    `Replica.queued_calls` until the next message: a pause that keeps requests goes with the first work, and the resume
    goes with the last call if no check can refuse it any more.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...choices import Cache, Pause, check_choice
from ...errors import InvalidInput, PushFailed, PushRefused
from ..adapter_versions import CONSTANT_PATH, path_of
from ..control.base import Call, Control, Moved, NotOurs, Unheard
from ..control.calls import EngineGone
from ..messages import WorkerInfo
from ..state import State
from ..tenants import StaleRequests, stale_requests, tenant_id
from .planner import Transfer
from .replica import Replica

_ANY_TIME = frozenset({
    *("note_pause", "renew_lease", "abort", "received_checksums", "stage_update", "staged"),
    *("stage_version", "receive_version", "add_version", "remove_versions"),
})  # fmt: skip
"""Operations that may run while the engine generates: before its pause, or when nothing more will come."""


class EngineSequence:
    """The steps of one trainer's pushes, each for one engine whose handle is here.

    Args:
        owner: name of the trainer.
        pause, cache: what becomes of requests in flight, and of their KV cache; see `VllmSync`.
    """

    def __init__(self, owner: str, pause: Pause, cache: Cache = "reset") -> None:
        check_choice("pause", pause, Pause)
        check_choice("cache", cache, Cache)
        if cache == "keep" and pause != "keep":
            raise InvalidInput(
                f"cache='keep' is for requests that go on over a push, and pause={pause!r} leaves none: leave out one "
                "of the two"
            )
        self._owner, self._pause, self.cache, self.push = owner, pause, cache, ""

    def begin(self, owner: str) -> None:
        """Begin a push of this trainer, which workers know by `push`: they refuse calls that another push has left
        behind. (A call that was interrupted goes on in the engine, and with it the rest of its message.)"""
        self._owner, self.push = owner, secrets.token_hex(8)

    async def beat(self, control: Control) -> None:
        """Tell workers that this trainer lives."""
        call = self.make_call("renew_lease")
        await control.rpc(*call.arguments, **call.options)

    def make_call(self, op: str, **message: Any) -> Call:
        """Return the call of an operation in all workers of an engine. They refuse it if another push has the lease,
        and, but for those of `_ANY_TIME`, if the engine has generated since the first of them."""
        still = {} if op in _ANY_TIME else {"still": True}
        return Call("rpc", (op,), {"trainer": self._owner, "push": self.push, **still, **message})

    async def make(
        self, replica: Replica, calls: Sequence[Call], *, begins: bool = False, returned: list[Any] | None = None
    ) -> list[Any]:
        """Make the queued calls, and then these, in one message.

        Args:
            begins: whether these may change the engine.
            returned: a list that gets what these return, also where one raises.

        Returns:
            that list; shorter than the calls where one did not return what it has to.

        Raises:
            what a call raises. Where a queued one did, the engine is as before, and `Replica.begun` says so.
        """
        due, replica.queued_calls = replica.queued_calls, []
        made, returned = list[Any](), [] if returned is None else returned
        lost = False  # whether it is unknown how far the message came
        try:
            if due or calls:
                await replica.handle.chain([*due, *calls], made)
        except BaseException as error:
            lost = isinstance(error, EngineGone | Unheard) or not isinstance(error, Exception)
            replica.lost, replica.moved = isinstance(error, NotOurs), isinstance(error, Moved)
            raise
        finally:
            returned += made[len(due) :]
            held = next((f for call, f in zip(due, made, strict=False) if call.wanted and f not in call.wanted), "")
            # The call behind those that were made is the one that failed. Where it was refused, it did nothing.
            came = lost or len(made) >= len(due) + replica.lost
            replica.begun = replica.begun or (begins and came and not held)
            if due and due[0].method == "stands":
                replica.paused_by_us = made[:1] == [False]  # the user's pause stays
        if held and replica.keeps:
            raise PushRefused(
                f"sessions of streamed input ({held}) count their tokens anew with each part, so that their answers "
                "could not say which weights computed what: let them end, or push with cache='reset'"
            )
        if held:
            raise PushRefused(
                f"requests that wait for more of their input (streaming-input sessions), or for blocks of another "
                f"engine, hold cached blocks of its weights, and vLLM drops no block of theirs ({held}): let them end, "
                "or push with pause='abort', which ends them unless somebody else has paused the engine"
            )
        return returned

    async def tell(self, replica: Replica, op: str, **message: Any) -> list[dict[str, Any]]:
        """Make the queued calls, and an operation in all workers; return the workers' answers."""
        [answers] = await self.make(replica, [self.make_call(op, **message)])
        return answers

    def check(self, replica: Replica) -> None:
        """Raise `PushRefused` if an engine cannot keep what this push is to keep."""
        why = next((worker.unkept for worker in replica.workers if worker.unkept), "")
        if self.cache == "keep" and why:
            raise PushRefused(f"engine {replica.index} {why}. Push with cache='reset'")

    def keeps(self, replica: Replica) -> bool:
        """Return True if requests in flight keep their KV cache over a push that begins now."""
        # Weights that slept have taken the KV cache with them, and nobody knows what dirty ones have computed.
        asleep = replica.slept is not None or replica.asleep or replica.waking
        return self.cache == "keep" and replica.state.kind != "dirty" and not asleep

    # ---- pause -------------------------------------------------------------------------------------------------------

    async def pause(self, replica: Replica, mode: str, *, brought: State) -> None:
        """Stop generation; with the next message, where no request is waited for or ended.

        A request keeps the adapter, or none, with which it began, and a change of mode, or of the tenant that is
        merged, replaces the weights that it needs: such requests end first, or, where the engine is paused on
        half-written weights, are ended at once.

        Args:
            brought: the state that the push brings.

        Raises:
            PushRefused: one of these changes, and the engine is paused by its user, perhaps with such requests; or
                another tenant is merged, and nobody can end requests that come meanwhile and name no adapter.
        """
        switches = {replica.served, mode} == {"merged", "adapter"}
        replica.keeps = self.keeps(replica)
        holders = Call("will_keep" if replica.keeps else "holders", wanted=("",))
        began = replica.began if replica.still_paused else replica.served
        replica.to_adapter = mode == "adapter" if switches or {began, mode} == {"merged", "adapter"} else None
        # An engine that holds an adapter, and gets the next one in its place, allows it already. One that has none, and
        # gets none over this handle, allows none: a server's list of adapters may want a key that pushes lack.
        comes = replica.handle.adapters is None or "adapter" in (replica.state.kind, replica.began)
        changes = comes and (replica.still_paused or replica.state.kind != brought.kind)
        if replica.newest or (changes and replica.workers[0].lora is not None and not replica.handle.versions):
            replica.allowed = [CONSTANT_PATH] if brought.kind == "adapter" else []
        switches = switches or bool(replica.kept)  # versions go with the base that they belong to
        replica.stale = stale_requests(replica.served_tenants, brought.tenants)
        replica.tenants = brought.tenants if brought.tenants or replica.served_tenants else None
        switches = switches or replica.stale is not None
        if replica.stale is not None and replica.stale.merged and not replica.handle.ends_requests:
            raise PushRefused(
                f"it has tenant {replica.served_tenants[0]!r} merged, and requests that come over its handle while "
                f"{brought.tenants[0]!r} takes its place cannot be ended: they would be answered by the wrong one. "
                "Give the AsyncLLM itself, or keep the tenant that is merged"
            )
        pause = self._pause_of(replica, switches)
        if replica.still_paused:
            replica.paused_by_us = True
            replica.queued_calls = [self.make_call("renew_lease"), Call("pause", (pause,)), holders]
        else:
            paused = Call("stands")
            # Noted before: a pause that times out here may still take effect there.
            noted = self.make_call("note_pause", paused=True)
            replica.queued_calls = [
                paused,
                replace(noted, unless=paused),
                Call("pause", (pause,), unless=paused),
                holders,
            ]
        if changes and replica.allowed:  # requests for the adapter come in from now on, and wait for it
            # "stands" may have taken long, and "note_pause" is not made then: this push may be over.
            told = Call("allow_adapters", ([], False, replica.allowed))
            replica.queued_calls[-2:-2] = [self.make_call("renew_lease"), told]
        if pause != "keep" or replica.shares is not None:  # engines that share experts stop when all are asked to
            await self.make(replica, [])
            stays = not replica.paused_by_us and replica.handle.keeps
            if switches and stays and replica.slept is None:
                what, ours, theirs = "mode", repr(mode), repr(replica.served)
                if replica.to_adapter is None and replica.stale is not None:
                    what, ours = "tenants", ", ".join(brought.tenants) or "none"
                    theirs = ", ".join(replica.served_tenants)
                elif replica.to_adapter is None:
                    what, ours, theirs = "versions", "another base", ", ".join(str(one) for one in replica.kept)
                raise PushRefused(
                    f"it holds weights of {what} {theirs} and was paused by somebody else: requests that were "
                    f"kept would go on with those of {what} {ours}. Resume it before a push that changes the {what}"
                )

    def _pause_of(self, replica: Replica, switches: bool) -> str:
        """Decide what happens to requests in flight."""
        if replica.still_paused and replica.state.kind == "dirty" and self._pause != "abort":
            return "abort" if switches else "keep"
        return "wait" if switches and self._pause == "keep" else self._pause

    # ---- the work ----------------------------------------------------------------------------------------------------

    async def settle(
        self, replica: Replica, one: Transfer, work: Call | None, *, name: str, begins: bool, commits: bool, ends: bool
    ) -> None:
        """Bring a transfer to its end in one replica, in one message: workers run their operation, caches of the old
        weights are reset, every worker records the new state, and the engine resumes.

        Args:
            work: the workers' operation; None for none.
            name: what the engine calls its weights from now on; "" if another transfer of this push follows.
            begins: whether the operation may change the engine.
            commits: whether nothing else of the transfer follows, so that workers record the new state.
            ends: whether nothing else of the push does.
        """
        calls = [] if work is None else [work]
        reset = len(calls)
        if name:
            calls += self._resets(replica)
            calls += [] if one.payload.merges else _names(name, one.state)  # else when it is merged
        commit = [self._commit(one)] if commits else []
        returned = await self._made(replica, [*calls, *commit], begins, ends)
        if name:
            _check_reset(replica, returned[reset])
        if commits:
            _committed(replica, one, returned[len(calls)])

    async def stage(self, replica: Replica, call: Call) -> None:
        """Have workers receive an update while the engine goes on generating, and wait until they have it. The queued
        calls, the pause among them, stay queued."""
        await replica.handle.rpc(*call.arguments, **call.options)
        asked = self.make_call("staged")
        while not all(answer["staged"] for answer in await replica.handle.rpc(*asked.arguments, **asked.options)):
            await replica.handle.rest()

    async def finish(self, replica: Replica, one: Transfer, *, name: str, ends: bool, resets: bool = False) -> None:
        """End a transfer in a replica: workers merge the update that all of them have received, or record the new
        state, as the trainer has written all.

        Args:
            name, ends: see `settle`.
            resets: whether caches of the old weights have to be reset yet, as the update was staged.
        """
        before = self._resets(replica) if resets and name else []
        calls = [self._commit(one)]
        if one.payload.merges:
            calls = [self.make_call("merge", state=one.state.to_json()), *(_names(name, one.state) if name else [])]
        begins = one.payload.merges
        returned = await self._made(replica, [*before, *calls], begins, ends)
        if before and not returned[0]:
            replica.begun = False  # nothing of the merge was done
            _check_reset(replica, False)
        _committed(replica, one, returned[len(before)])

    def _resets(self, replica: Replica) -> list[Call]:
        """Return the calls that reset an engine's caches of the old weights; the first returns True if it could."""
        # Nothing runs before the resume. Requests that were kept, by us or by a user's own pause, hold blocks.
        running = self._pause != "abort" or not replica.paused_by_us
        reset = Call("reset_prefix_cache", (running, bool(replica.workers[0].connector)), wanted=(True,))
        if replica.keeps:
            reset = Call("keep_cache", wanted=(True,))
        return [reset, *([Call("reset_media_caches")] if replica.workers[0].multimodal else [])]

    def _commit(self, one: Transfer) -> Call:
        return self.make_call("commit", full=one.payload.full, state=one.state.to_json())

    async def _made(self, replica: Replica, calls: Sequence[Call], begins: bool, ends: bool) -> list[Any]:
        """Make calls as `make` does, and resume after them if they are the push's last. Where only the resume fails,
        the engine holds what was pushed: `go_on` raises the error."""
        resume, returned = self._resume(replica) if ends else [], list[Any]()
        try:
            await self.make(replica, [*calls, *resume], begins=begins, returned=returned)
        except Exception as error:
            if not ends or len(returned) < len(calls):
                raise
            replica.resume_error = error
        replica.resumed = ends and len(returned) == len(calls) + len(resume)
        return returned

    def _resume(self, replica: Replica) -> list[Call]:
        """Return the calls that resume the engine, if this push has paused it, and end the push."""
        paused = next((call for call in replica.queued_calls if call.method == "stands"), None)
        resume = [Call("resume", unless=paused)] if replica.paused_by_us or paused is not None else []
        return [*_end_wrong_mode_requests(replica), *resume, self._end(serves=True, paused=False)]

    def _end(self, **notes: bool) -> Call:
        return Call("rpc", ("end",), {"owner": self._owner, "push": self.push, **notes})

    # ---- what comes after --------------------------------------------------------------------------------------------

    async def go_on(self, replica: Replica) -> None:
        """Put a failed engine into a defined state; wake and resume another one, if this push woke and paused it.

        A dirty engine serves nothing: it stays paused, or without its KV cache, until a push has healed it. One to
        which nothing was written goes back to where it was.
        """
        if replica.resume_error is not None:
            raise replica.resume_error
        replica.queued_calls = []  # a pause that nobody has asked for yet
        if replica.resumed or replica.lost:
            return
        asleep, notes, calls = replica.slept is not None, dict[str, bool](), list[Call]()
        if replica.error and replica.begun:
            await self._stop(replica)
        if not (replica.error and replica.begun) and replica.state.kind != "dirty":
            notes["serves"] = True
            if asleep and replica.error:
                with suppress(Exception):  # the next push finds what stays awake; this one raises its own error
                    await self.sleep_again(replica)
            elif asleep:
                await replica.handle.wake("kv_cache")
                notes["waking"] = False
            if not replica.error:
                calls += _end_wrong_mode_requests(replica)
            elif replica.paused_by_us and replica.to_adapter is not None and replica.state.kind == replica.served:
                # Those that came meanwhile were made for the mode that has not come.
                calls.append(Call("end_wrong_mode_requests", (not replica.to_adapter,)))
            if replica.error and replica.allowed:  # it was told what was coming, and has what it had
                calls.append(Call("allow_adapters", (_there(replica), True)))
            if replica.paused_by_us:
                calls.append(Call("resume"))
                # A pause that timed out may take effect yet: the next push then knows that it is none of the user's.
                notes["paused"] = bool(replica.error)
        claimed = [self.make_call("renew_lease")] if calls else []  # these look at no lease by themselves
        await self.make(replica, [*claimed, *calls, self._end(**notes)])

    async def _stop(self, replica: Replica) -> None:
        """Abort the push in an engine that holds a part of it, and pause it again where somebody has resumed it: blocks
        that it has cached meanwhile belong to no valid weights."""
        paused = Call("paused")
        unless = None if replica.moved else paused  # one whose requests are to end first steps on
        stops = [
            replace(self.make_call("note_pause", paused=True), unless=unless),
            Call("pause", ("keep",), unless=unless),
            Call("reset_prefix_cache", (True, bool(replica.workers[0].connector)), unless=unless),
        ]
        await self.make(replica, [self.make_call("abort", reason=f"a push failed: {replica.error}"), paused, *stops])

    async def catch_up(self, replica: Replica, state: State, name: str) -> None:
        """Reset the caches of an engine that has the new weights after an interrupt, tell it their name, and end the
        requests that came for other ones."""
        replica.queued_calls = []
        calls = [self.make_call("renew_lease"), *self._resets(replica), *_names(name, state)]
        calls += _end_wrong_mode_requests(replica)
        _check_reset(replica, (await self.make(replica, calls))[1])

    async def sleep_again(self, replica: Replica) -> None:
        """Put an engine that was asleep back to sleep at its level."""
        if not replica.slept:
            return
        await self.tell(replica, "renew_lease")
        try:
            await replica.handle.sleep(replica.slept)
        finally:
            # vLLM 0.26 takes one whose KV cache sleeps for asleep, and leaves its weights where they are, as a call
            # that fails does: then the next push has the KV cache alone to wake.
            workers = [WorkerInfo.read(answer) for answer in await replica.handle.rpc("hello")]
            await self.tell(replica, "note_pause", waking=not any(worker.asleep for worker in workers))


def _names(name: str, state: State) -> list[Call]:
    """Return the calls that tell an engine the name of what it serves from now on."""
    return [Call("label", (name,)), Call("name_adapter", (state.kind == "adapter",))]


def _end_wrong_mode_requests(replica: Replica) -> list[Call]:
    """Return the calls that end requests which came while the mode, or the tenants, changed and were made for the
    other ones, or for versions of adapters that have gone."""
    ends = [] if replica.to_adapter is None else [Call("end_wrong_mode_requests", (replica.to_adapter,))]
    if replica.tenants is not None:
        stale = StaleRequests(False, []) if replica.stale is None else replica.stale
        ends.append(Call("end_tenants_requests", (*stale, [tenant_id(name) for name in replica.tenants])))
    return ends if replica.allowed is None else [*ends, Call("allow_adapters", (replica.allowed, True))]


def _there(replica: Replica) -> list[str]:
    """Return the paths of the adapters that an engine holds."""
    return [path_of(one) for one in replica.kept] or ([CONSTANT_PATH] if replica.state.kind == "adapter" else [])


def _check_reset(replica: Replica, done: bool) -> None:
    """Raise `PushFailed` if the prefix cache was not reset."""
    if done:
        return
    connector = replica.workers[0].connector
    outside = f", or its KV connector ({connector}) said that it cannot forget its own" if connector else ""
    raise PushFailed(
        f"the prefix cache could not be reset: requests hold blocks of the old weights{outside}; push with "
        "pause='keep', or when no request is in flight"
    )


def _committed(replica: Replica, one: Transfer, answers: Sequence[Mapping[str, Any]]) -> None:
    """Note what the workers answered to a commit or a merge: every one holds the new state."""
    held = {answer["rank"]: State(**answer["state"]) for answer in answers}
    for worker in replica.workers:
        worker.state = held[worker.rank]
    shares = [written / elements if elements else None for written, elements in (a["elements"] for a in answers)]
    replica.coverage = None if None in shares else min(share or 0.0 for share in shares)
    replica.reloaded = max(a["reloaded"] for a in answers) if one.payload.merges or one.state.kind != "adapter" else 0
