//! [`LinkBytes`]: the bytes of a collective on the links within nodes and between them.

use lowp_comm::Mesh;
use lowp_format::gcd;
use serde::Serialize;
use std::ops::{AddAssign, Mul};

/// Bytes that arrive over each kind of link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LinkBytes {
    /// Bytes from ranks of the same node.
    pub within_node: u128,
    /// Bytes from ranks of other nodes.
    pub between_nodes: u128,
}

/// What a collective of all its groups moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MovedBytes {
    /// A rank's part on the busiest node.
    pub rank: LinkBytes,
    /// The sum over all ranks.
    pub world: LinkBytes,
}

/// How pieces reach the ranks of another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// A piece enters a node once and goes on within it (rings and trees; sums take the same way back).
    Shared,
    /// Each rank sends its part to the rank that wants it.
    Direct,
}

impl LinkBytes {
    fn new(within_node: u128, between_nodes: u128) -> Self {
        Self {
            within_node,
            between_nodes,
        }
    }

    /// A part of `ranks` equal ones, rounded up.
    fn share(self, ranks: u128) -> Self {
        let Self {
            within_node,
            between_nodes,
        } = self;
        Self::new(within_node.div_ceil(ranks), between_nodes.div_ceil(ranks))
    }

    fn max(self, other: Self) -> Self {
        Self::new(
            self.within_node.max(other.within_node),
            self.between_nodes.max(other.between_nodes),
        )
    }
}

impl AddAssign for LinkBytes {
    fn add_assign(&mut self, other: Self) {
        self.within_node += other.within_node;
        self.between_nodes += other.between_nodes;
    }
}

impl Mul<u128> for LinkBytes {
    type Output = Self;

    fn mul(self, times: u128) -> Self {
        Self::new(self.within_node * times, self.between_nodes * times)
    }
}

impl AddAssign for MovedBytes {
    fn add_assign(&mut self, other: Self) {
        self.rank += other.rank;
        self.world += other.world;
    }
}

impl Mul<u128> for MovedBytes {
    type Output = Self;

    fn mul(self, times: u128) -> Self {
        Self {
            rank: self.rank * times,
            world: self.world * times,
        }
    }
}

/// An all-gather of `pieces`, or a reduce-scatter into them, in each of `groups` groups of neighbouring ranks, the first of
/// which begins with rank 0. Every rank gets all pieces of its group but its own.
pub(super) fn neighbours(
    pieces: &[u64],
    groups: usize,
    per_node: usize,
    route: Route,
) -> MovedBytes {
    let ranks = pieces.len();
    let mut ends = vec![0u128];
    for &piece in pieces {
        ends.push(ends[ends.len() - 1] + u128::from(piece));
    }
    let total = ends[ranks];
    let mut moved = MovedBytes::default();
    if ranks == 0 || total == 0 {
        return moved;
    }
    for (place, times) in places(ranks, groups, per_node) {
        let (mut start, mut end) = (0, ranks.min(per_node - place));
        while start < ranks {
            let (here, own) = ((end - start) as u128, ends[end] - ends[start]);
            let node = match route {
                Route::Shared => LinkBytes::new((here - 1) * total, total - own),
                Route::Direct => LinkBytes::new((here - 1) * own, (ranks as u128 - here) * own),
            };
            moved.world += node * times;
            moved.rank = moved.rank.max(node.share(here));
            (start, end) = (end, ranks.min(end.saturating_add(per_node)));
        }
    }
    moved
}

/// What ranks send each other one by one, in each of some groups of neighbouring ranks, the first of which begins with rank 0.
pub(super) struct Sends {
    ranks: usize,
    per_node: usize,
    groups: Vec<SendsOfGroup>,
}

/// Of groups that begin at the same place of a node.
struct SendsOfGroup {
    times: u128,
    place: usize,
    /// What arrives, by node.
    nodes: Vec<LinkBytes>,
}

impl Sends {
    pub(super) fn new(ranks: usize, groups: usize, per_node: usize) -> Self {
        let group = |(place, times)| SendsOfGroup {
            times,
            place,
            nodes: vec![LinkBytes::default(); (place + ranks).div_ceil(per_node)],
        };
        Self {
            ranks,
            per_node,
            groups: places(ranks, groups, per_node).map(group).collect(),
        }
    }

    /// Rank `from` of each group sends these bytes to rank `to`.
    pub(super) fn add(&mut self, from: usize, to: usize, bytes: u128) {
        for SendsOfGroup { place, nodes, .. } in &mut self.groups {
            let [from, to] = [from, to].map(|rank| (*place + rank) / self.per_node);
            nodes[to] += match from == to {
                true => LinkBytes::new(bytes, 0),
                false => LinkBytes::new(0, bytes),
            };
        }
    }

    /// Pieces of all ranks of each group travel to the rank that has the whole, and back: rank `r` has `owned[r]` wholes of these pieces.
    pub(super) fn add_owned(&mut self, pieces: &[u64], owned: &[u128]) {
        let all: u128 = pieces.iter().map(|&piece| u128::from(piece)).sum();
        let wholes: u128 = owned.iter().sum();
        for SendsOfGroup { place, nodes, .. } in &mut self.groups {
            let node = |rank: usize| (*place + rank) / self.per_node;
            let mut of_nodes = vec![0u128; nodes.len()];
            for (rank, &piece) in pieces.iter().enumerate() {
                of_nodes[node(rank)] += u128::from(piece);
            }
            // Back from another node, unless the whole is on this one.
            for (arrived, own) in nodes.iter_mut().zip(&of_nodes) {
                arrived.between_nodes += wholes * own;
            }
            for (rank, &times) in owned.iter().enumerate() {
                let (arrived, own) = (&mut nodes[node(rank)], of_nodes[node(rank)]);
                arrived.between_nodes -= times * own;
                let within = own - u128::from(pieces[rank]);
                *arrived += LinkBytes::new(2 * within, all - own) * times;
            }
        }
    }

    pub(super) fn moved(&self) -> MovedBytes {
        let mut moved = MovedBytes::default();
        for group in &self.groups {
            for (node, &arrived) in group.nodes.iter().enumerate() {
                let start = (node * self.per_node).max(group.place);
                let end = (group.place + self.ranks).min((node + 1) * self.per_node);
                moved.world += arrived * group.times;
                moved.rank = moved.rank.max(arrived.share((end - start) as u128));
            }
        }
        moved
    }
}

/// Where groups begin in their nodes, and how many of them.
fn places(ranks: usize, groups: usize, per_node: usize) -> impl Iterator<Item = (usize, u128)> {
    let alike = per_node / gcd(ranks, per_node);
    (0..alike.min(groups)).map(move |group| {
        let times = (groups - group).div_ceil(alike) as u128;
        (group * ranks % per_node, times)
    })
}

/// An all-reduce of so many bytes in each of `groups` groups of neighbouring ranks: a reduce-scatter and an all-gather, in equal parts.
pub(super) fn all_reduce(bytes: u64, ranks: usize, groups: usize, per_node: usize) -> MovedBytes {
    let all = ranks.max(1) as u64;
    let parts: Vec<u64> = (0..all).map(|rank| (bytes + rank) / all).collect();
    neighbours(&parts, groups, per_node, Route::Shared) * 2
}

/// An all-reduce between replicas: rank `s` of each has `values[s]` bytes, which meet those of the same shard of the others. It
/// is a reduce-scatter and an all-gather, in equal parts.
pub(super) fn replicas(values: &[u64], mesh: Mesh, per_node: usize) -> MovedBytes {
    let Mesh { replicate, shard } = mesh;
    let mut moved = MovedBytes::default();
    for (s, &bytes) in values.iter().enumerate() {
        let bytes = u128::from(bytes);
        let node = |replica: usize| (replica * shard + s) / per_node;
        let (mut nodes, mut start) = (0u128, 0);
        while start < replicate {
            let mut end = start + 1;
            while end < replicate && node(end) == node(start) {
                end += 1;
            }
            let (here, all) = ((end - start) as u128, replicate as u128);
            let part = LinkBytes::new(
                2 * (here - 1) * bytes,
                (2 * (all - here) * bytes).div_ceil(all),
            );
            moved.rank = moved.rank.max(part.share(here));
            nodes += 1;
            start = end;
        }
        let all = replicate as u128;
        moved.world += LinkBytes::new(2 * (all - nodes) * bytes, 2 * (nodes - 1) * bytes);
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces of uneven lengths, some empty.
    fn pieces(ranks: usize) -> Vec<u64> {
        (0..ranks as u64)
            .map(|rank| (rank * 7919 + 13) % 101)
            .collect()
    }

    /// What arrives is what everybody lacks, however ranks are placed.
    #[test]
    fn links_add_up_to_what_arrives() {
        for (ranks, groups, per_node) in (1..14)
            .flat_map(|ranks| (1..6).map(move |groups| (ranks, groups)))
            .flat_map(|(ranks, groups)| (1..12).map(move |per_node| (ranks, groups, per_node)))
        {
            let what = format!("{groups} groups of {ranks}, {per_node} a node");
            let pieces = pieces(ranks);
            let total: u128 = pieces.iter().map(|&piece| u128::from(piece)).sum();
            let arrives = (ranks - 1) as u128 * total * groups as u128;
            for route in [Route::Shared, Route::Direct] {
                let MovedBytes { rank, world } = neighbours(&pieces, groups, per_node, route);
                assert_eq!(world.within_node + world.between_nodes, arrives, "{what}");
                let all = (ranks * groups) as u128;
                assert!(rank.within_node * all >= world.within_node, "{what}");
                assert!(rank.between_nodes * all >= world.between_nodes, "{what}");
                if ranks * groups <= per_node {
                    assert_eq!(world.between_nodes, 0, "{what}");
                }
                if per_node == 1 {
                    assert_eq!(world.within_node, 0, "{what}");
                }
            }
            let mesh = Mesh {
                replicate: groups,
                shard: ranks,
            };
            let MovedBytes { world, .. } = replicas(&pieces, mesh, per_node);
            let arrives = 2 * (groups - 1) as u128 * total;
            assert_eq!(world.within_node + world.between_nodes, arrives, "{what}");
        }
    }

    /// Counted rank by rank: who gets which piece from which node.
    #[test]
    fn links_are_those_of_each_piece() {
        for (ranks, groups, per_node) in [(8, 1, 4), (6, 4, 4), (5, 3, 8), (12, 2, 5)] {
            let pieces = pieces(ranks);
            let node = |group: usize, rank: usize| (group * ranks + rank) / per_node;
            let [mut shared, mut direct] = [0, 0];
            for (group, owner) in (0..groups).flat_map(|g| (0..ranks).map(move |r| (g, r))) {
                let others = (0..ranks).map(|rank| node(group, rank));
                let mut others: Vec<usize> = others.filter(|n| *n != node(group, owner)).collect();
                direct += others.len() as u128 * u128::from(pieces[owner]);
                others.dedup();
                shared += others.len() as u128 * u128::from(pieces[owner]);
            }
            for (route, expected) in [(Route::Shared, shared), (Route::Direct, direct)] {
                let MovedBytes { world, .. } = neighbours(&pieces, groups, per_node, route);
                assert_eq!(world.between_nodes, expected, "{ranks} {groups} {per_node}");
            }
        }
    }

    /// An exchange of all with all, part by part, moves what a direct one does.
    #[test]
    fn sends_are_those_of_each_rank() {
        for (ranks, groups, per_node) in (1..9)
            .flat_map(|ranks| (1..5).map(move |groups| (ranks, groups)))
            .flat_map(|(ranks, groups)| (1..8).map(move |per_node| (ranks, groups, per_node)))
        {
            let pieces = pieces(ranks);
            let mut sends = Sends::new(ranks, groups, per_node);
            for (to, &piece) in pieces.iter().enumerate() {
                for from in (0..ranks).filter(|&from| from != to) {
                    sends.add(from, to, u128::from(piece));
                }
            }
            let direct = neighbours(&pieces, groups, per_node, Route::Direct);
            assert_eq!(sends.moved(), direct, "{ranks} {groups} {per_node}");
        }
    }

    /// Pieces that travel to wholes and back are what each rank sends another.
    #[test]
    fn pieces_of_wholes_travel_one_by_one() {
        for (ranks, groups, per_node) in (1..9)
            .flat_map(|ranks| (1..5).map(move |groups| (ranks, groups)))
            .flat_map(|(ranks, groups)| (1..8).map(move |per_node| (ranks, groups, per_node)))
        {
            let pieces = pieces(ranks);
            let owned: Vec<u128> = (0..ranks as u128).map(|rank| rank * 5 % 3).collect();
            let [mut one_by_one, mut at_once] =
                [(); 2].map(|()| Sends::new(ranks, groups, per_node));
            for (owner, &times) in owned.iter().enumerate() {
                for rank in (0..ranks).filter(|&rank| rank != owner) {
                    let bytes = times * u128::from(pieces[rank]);
                    one_by_one.add(rank, owner, bytes);
                    one_by_one.add(owner, rank, bytes);
                }
            }
            at_once.add_owned(&pieces, &owned);
            let what = format!("{groups} groups of {ranks}, {per_node} a node");
            assert_eq!(at_once.moved(), one_by_one.moved(), "{what}");
        }
    }

    #[test]
    fn many_ranks_on_large_nodes() {
        let even = vec![3; 1 << 17];
        let moved = neighbours(&even, 1, 8, Route::Shared);
        assert_eq!(moved.world.between_nodes, 3 * ((1 << 17) - 8) * (1 << 14));
        let alone = neighbours(&[5; 2], 1 << 16, usize::MAX, Route::Shared);
        assert_eq!(alone.world, LinkBytes::new(10 << 16, 0));
    }
}
