"""Joint pairs: preferences between what the agents of several policies said, learned together.

The loss of a pair is a function of one number, the margin: a sum over all its replies, of which
this learner has only its own policy's. It computes their log-ratios without gradients as they
arrive, and holds the rows back. Once the trainers have exchanged their sums (`ExchangePairSums` of
the experience store), each learner knows every margin and makes the gradient of its own replies.
MADPO: CoMLRL 1.4, `trainers/preference/madpo.py`, with a reference policy as in DPO.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from services.trainer.learning.samples import Row
from troupe.algorithms.losses import SideSums
from troupe.v1 import experience_store_pb2 as store_pb


class JointPairs:
    """The joint pairs of a step: sums over this policy's replies, and later over all policies'."""

    def __init__(self) -> None:
        self._own: dict[str, store_pb.PairSum] = {}
        # Of the pairs that no policy lacks a reply of; None: not known yet.
        self._all: dict[str, store_pb.PairSum] | None = None

    def add(self, rows: Sequence[Row], log_ratios: torch.Tensor) -> None:
        """Add this policy's replies with their log(pi/pi_ref), [n], summed over tokens."""
        for row, ratio in zip(rows, log_ratios.tolist(), strict=True):
            pair = self._own.get(row.group)
            if pair is None:
                pair = store_pb.PairSum(
                    pair=row.group, policies=1, joint_policies=row.joint_policies
                )
                self._own[row.group] = pair
            if row.reward > 0:
                pair.chosen += ratio
                pair.chosen_tokens += row.response_length
            else:
                pair.rejected += ratio
                pair.rejected_tokens += row.response_length

    def own(self) -> store_pb.PairSums:
        """Return the sums over this policy's replies, of pairs with both sides."""
        whole = (one for one in self._own.values() if one.chosen_tokens and one.rejected_tokens)
        return store_pb.PairSums(pairs=sorted(whole, key=lambda one: one.pair))

    def join(self, sums: store_pb.PairSums) -> int:
        """Take the sums over all policies; return the number of pairs that are complete."""
        self._all = {
            one.pair: one for one in sums.pairs if one.policies == max(one.joint_policies, 1)
        }
        return len(self._all)

    def sides(self, pairs: Iterable[str]) -> SideSums:
        """Return the sums over all replies of these pairs."""
        assert self._all is not None, "the policies have exchanged their sums"
        found = [self._all.get(pair, store_pb.PairSum()) for pair in pairs]
        return SideSums(
            _by_side((one.rejected, one.chosen) for one in found),
            _by_side((one.rejected_tokens, one.chosen_tokens) for one in found),
            torch.tensor([one.policies > 0 for one in found]),
        )

    def state(self) -> Mapping[str, Any]:
        """Return the own sums as plain values (JSON), for suspension."""
        return {
            one.pair: [
                one.chosen,
                one.rejected,
                one.chosen_tokens,
                one.rejected_tokens,
                one.joint_policies,
            ]
            for one in self._own.values()
        }

    @staticmethod
    def restored(values: Mapping[str, Any]) -> JointPairs:
        """Return the pairs whose `state` was `values`."""
        found = JointPairs()
        for pair, (chosen, rejected, chosen_tokens, rejected_tokens, policies) in values.items():
            found._own[pair] = store_pb.PairSum(
                pair=pair,
                chosen=chosen,
                rejected=rejected,
                chosen_tokens=chosen_tokens,
                rejected_tokens=rejected_tokens,
                policies=1,
                joint_policies=policies,
            )
        return found


def _by_side(values: Iterable[tuple[float, float]]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64).reshape(-1, 2)
