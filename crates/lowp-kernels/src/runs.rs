//! [`Runs`]: entries that are copied in another order.

use std::ops::Range;

/// Runs of entries in three nested orders, outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Entries of each run.
    pub len: usize,
    /// How many there are of each order.
    pub counts: [usize; 3],
    /// The first entry in the source.
    pub from: usize,
    /// Entries from one to the next there, by order.
    pub from_pitch: [usize; 3],
    /// The first entry in the destination.
    pub to: usize,
    /// Entries from one to the next there, by order.
    pub to_pitch: [usize; 3],
}

impl Runs {
    /// The same entries, with a pitch only where there are several; nothing where there are none.
    pub(crate) fn normalized(&self) -> Option<Self> {
        if self.len == 0 || self.counts.contains(&0) {
            return None;
        }
        let several = |pitch: [usize; 3]| {
            let mut counts = self.counts.iter();
            pitch.map(|pitch| match counts.next() {
                Some(1) => 0,
                _ => pitch,
            })
        };
        Some(Self {
            from_pitch: several(self.from_pitch),
            to_pitch: several(self.to_pitch),
            ..*self
        })
    }

    /// Entries of all runs; `None` if their number overflows.
    pub(crate) fn entries(&self) -> Option<usize> {
        let mut counts = self.counts.iter();
        counts.try_fold(self.len, |all, &n| all.checked_mul(n))
    }

    /// The end of the entries of normalized runs that begin at `first` and are `pitch` apart; `None` if it overflows.
    fn end(&self, first: usize, pitch: [usize; 3]) -> Option<usize> {
        let mut orders = self.counts.iter().zip(pitch);
        let last = orders.try_fold(first, |at, (&count, pitch)| {
            at.checked_add((count - 1).checked_mul(pitch)?)
        })?;
        last.checked_add(self.len)
    }

    /// The ends of the entries of normalized runs in the source and in the destination.
    pub(crate) fn ends(&self) -> [Option<usize>; 2] {
        [
            self.end(self.from, self.from_pitch),
            self.end(self.to, self.to_pitch),
        ]
    }

    /// What normalized runs write, with those that follow each other in the destination merged into one: the length of a merged run, and per
    /// order, nearest first, how many there are and how far apart.
    fn merged_writes(&self) -> (usize, [(usize, usize); 3]) {
        let [a, b, c] = self.to_pitch;
        let [i, j, k] = self.counts;
        let mut orders = [(i, a), (j, b), (k, c)];
        orders.sort_by_key(|&(_, pitch)| pitch);
        let mut len = self.len;
        for (count, pitch) in &mut orders {
            if *count > 1 && *pitch != len {
                break;
            }
            len *= *count;
            *count = 1;
        }
        (len, orders)
    }

    /// The same runs back.
    #[must_use]
    pub const fn reversed(self) -> Self {
        Self {
            from: self.to,
            from_pitch: self.to_pitch,
            to: self.from,
            to_pitch: self.from_pitch,
            ..self
        }
    }
}

/// The first of these normalized runs that writes an entry again, and that entry. The runs have `all` entries together and write to none
/// from `all` on: if none is written again, each of `0..all` is written once.
pub(crate) fn written_twice(copies: &[Runs], all: usize) -> Option<[usize; 2]> {
    if let [only] = copies
        && only.merged_writes().0 == all
    {
        return None;
    }
    let mut seen = vec![0u64; all.div_ceil(64)];
    copies.iter().enumerate().find_map(|(copy, runs)| {
        let (len, [a, b, c]) = runs.merged_writes();
        let places = |(count, pitch): (usize, usize)| (0..count).map(move |i| i * pitch);
        let mut starts =
            places(a).flat_map(|a| places(b).flat_map(move |b| places(c).map(move |c| a + b + c)));
        let entry =
            starts.find_map(|start| mark(&mut seen, runs.to + start..runs.to + start + len));
        Some([copy, entry?])
    })
}

/// Marks entries as seen; the first one that was before.
fn mark(seen: &mut [u64], entries: Range<usize>) -> Option<usize> {
    let mut at = entries.start;
    while at < entries.end {
        let (word, bit) = (at / 64, at % 64);
        let len = (64 - bit).min(entries.end - at);
        let mask = (u64::MAX >> (64 - len)) << bit;
        let again = seen[word] & mask;
        if again != 0 {
            return Some(word * 64 + again.trailing_zeros() as usize);
        }
        seen[word] |= mask;
        at += len;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, Cpu, RearrangeJob, Rearranged, Work};
    use proptest::prelude::*;

    /// Copies of nothing count.
    #[test]
    fn an_error_names_the_copy_and_the_entry() {
        let run = |len: usize, to: usize| Runs {
            len,
            counts: [1; 3],
            from: 0,
            from_pitch: [0; 3],
            to,
            to_pitch: [0; 3],
        };
        let [from, to] = [(); 2].map(|()| Cpu.alloc::<u8>(8).expect("memory"));
        let job = RearrangeJob {
            copies: vec![run(4, 0), run(0, 0), run(4, 3)],
            buffers: Rearranged::Bytes([from, to]),
        };
        let error = Cpu.plan(Work::Rearrange(vec![job])).expect_err("an entry");
        let expected = "job 0 writes entry 3 of its destination again in copy 2;";
        assert!(error.to_string().starts_with(expected), "{error}");
    }

    proptest! {
        /// As counted entry by entry.
        #[test]
        fn entries_that_are_written_once(
            copies in prop::collection::vec(
                (0usize..4, prop::array::uniform3(0usize..4), 0usize..20, prop::array::uniform3(0usize..12)), 1..3,
            ),
            dense: bool,
        ) {
            let runs = |&(len, counts, to, to_pitch): &(usize, [usize; 3], usize, [usize; 3])| {
                let [a, b, _] = counts;
                let (to, to_pitch) = match dense {
                    true => (0, [len, a * len, a * b * len]),
                    false => (to, to_pitch),
                };
                Runs { len, counts, from: 0, from_pitch: [0; 3], to, to_pitch }
            };
            let copies: Vec<Runs> = copies.iter().map(runs).filter_map(|runs| runs.normalized()).collect();
            // With the copy that writes there.
            let mut places = Vec::new();
            for (number, copy) in copies.iter().enumerate() {
                let [a, b, c] = copy.counts;
                for (i, j, k) in (0..a).flat_map(|i| (0..b).flat_map(move |j| (0..c).map(move |k| (i, j, k)))) {
                    let pitch = copy.to_pitch;
                    let start = copy.to + i * pitch[0] + j * pitch[1] + k * pitch[2];
                    places.extend((start..start + copy.len).map(|place| (place, number)));
                }
            }
            places.sort_unstable();
            let all = places.len();
            let within = copies.iter().all(|copy| copy.ends()[1].is_some_and(|end| end <= all));
            let once = places.iter().map(|&(place, _)| place).eq(0..all);
            let again = within.then(|| written_twice(&copies, all));
            prop_assert_eq!(again == Some(None), once);
            if let Some([copy, entry]) = again.flatten() {
                let writers: Vec<_> = places.iter().filter(|(place, _)| *place == entry).map(|(_, number)| *number).collect();
                prop_assert!(writers.len() > 1 && writers[1] == copy, "{entry} by {writers:?}, found in {copy}");
            }
        }
    }
}
