//! Data of ranks that are processes, where more is moved than can travel at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{PATIENCE, bytes, tiling, values};
use lowp_comm::{
    Collective, CommError, Communicator, Control, GatherItem, GradWire, HostComm, ReduceItem,
    Traffic, run_comms, threads,
};
use lowp_kernels::{Backend, Cpu, Source};
use proptest::prelude::*;

/// A control that lets at most this many bytes travel at once.
#[derive(Debug)]
struct Limited(Arc<dyn Control>, usize);

impl Control for Limited {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn members(&self) -> &[usize] {
        self.0.members()
    }

    fn all_gather(&self, tag: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        let all = self.0.all_gather(tag, bytes)?;
        let together: usize = all.iter().map(Vec::len).sum();
        assert!(together <= self.1, "{tag}: {together} bytes at once");
        Ok(all)
    }

    fn differing(&self, tag: &str, own: u64, of: usize) -> Result<Option<Vec<u64>>, CommError> {
        self.0.differing(tag, own, of)
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Control>, CommError> {
        Ok(Arc::new(Limited(self.0.split(color, key)?, self.1)))
    }

    fn fail(&self, cause: CommError) -> CommError {
        self.0.fail(cause)
    }

    fn failure(&self) -> Option<CommError> {
        self.0.failure()
    }
}

/// What the ranks of a world have after `each`, and what they sent, where at most so many bytes travel at once.
fn run<T: Send + std::fmt::Debug>(
    (world, most, split): (usize, usize, bool),
    each: impl Fn(usize, &dyn Communicator<Cpu>) -> Result<T, CommError> + Sync,
) -> Vec<(T, Traffic)> {
    let host = |control| -> Arc<dyn Communicator<Cpu>> {
        HostComm::with_most(Arc::new(Limited(control, most)), &Cpu, most).into()
    };
    let comms: Vec<_> = threads(world, PATIENCE).into_iter().map(host).collect();
    let ran = run_comms(comms, |rank, comm| {
        let comm = match split {
            true => comm.split(0, rank)?,
            false => comm,
        };
        Ok::<_, CommError>((each(rank, &*comm)?, comm.traffic()))
    });
    ran.expect("the ranks")
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Also by ranks of a group that was split off, and of several tensors.
    #[test]
    fn what_does_not_travel_at_once_travels_in_several_rounds(
        lens in prop::collection::vec(prop::collection::vec(0usize..40, 3), 1..6),
        items in 1usize..4,
        most in 20usize..200,
        wire in prop::sample::select(vec![GradWire::F32, GradWire::Bf16]),
        split: bool,
        accumulate: bool,
    ) {
        let world = lens.len();
        // By item.
        let ranges: Vec<_> = (0..items)
            .map(|item| tiling(&lens.iter().map(|of_rank| of_rank[item]).collect::<Vec<_>>()))
            .collect();
        let all = |item: usize| lens.iter().map(|of_rank| of_rank[item]).sum::<usize>();
        let full = |item: usize| bytes(item as u64, all(item));
        let grad = |rank: usize, item: usize| values((10 * rank + item) as u64, all(item));
        let before = |rank: usize, item: usize| values(100, lens[rank][item]);
        let found = |most: usize| run((world, most, split), |rank, comm| {
            let up = |values: Vec<f32>| Cpu.upload(&values);
            let mut buffers = Vec::new();
            for item in 0..items {
                let source = Cpu.upload(&full(item)[ranges[item][rank].clone()])?;
                let dest = Cpu.alloc::<u8>(all(item))?;
                let out = up(before(rank, item))?;
                buffers.push((source, dest, Source::F32(up(grad(rank, item))?), out));
            }
            let gathers = buffers.iter().zip(&ranges);
            let gathers: Vec<_> = gathers.map(|((source, dest, ..), ranges)| GatherItem { source, dest, ranges }).collect();
            comm.enqueue("", Collective::AllGather(&gathers))?;
            let reduces = buffers.iter().zip(&ranges);
            let reduces: Vec<_> = reduces.enumerate().map(|(memory, ((.., grad, out), ranges))| ReduceItem { grad, memory, ranges, out, accumulate }).collect();
            comm.reduce_scatter(&reduces, wire)?;
            let [most_of, sums] = [(); 2].map(|()| up(grad(rank, 0)));
            let (most_of, sums, second) = (most_of?, sums?, up(grad(rank, items - 1))?);
            comm.enqueue("", Collective::Max(&most_of))?;
            comm.enqueue("", Collective::Sum(&[&sums, &second]))?;
            let dests = buffers.iter().map(|(_, dest, ..)| Cpu.download(dest)).collect::<Result<Vec<_>, _>>()?;
            let mut floats = buffers.iter().map(|(.., out)| Cpu.download(out)).collect::<Result<Vec<_>, _>>()?;
            for buffer in [&most_of, &sums, &second] {
                floats.push(Cpu.download(buffer)?);
            }
            Ok((dests, floats))
        });
        let fold = |item: usize, wire: Option<GradWire>, by: fn(f32, f32) -> f32| -> Vec<f32> {
            let sent = |rank| -> Vec<f32> {
                grad(rank, item).into_iter().map(|x| wire.map_or(x, |wire| wire.apply(x))).collect()
            };
            (1..world).map(sent).fold(sent(0), |sum, theirs| sum.into_iter().zip(theirs).map(|(a, b)| by(a, b)).collect())
        };
        let add: fn(f32, f32) -> f32 = |a, b| a + b;
        let expected = |rank: usize| {
            let reduced = |item: usize| -> Vec<f32> {
                let sums = &fold(item, Some(wire), add)[ranges[item][rank].clone()];
                let before = before(rank, item);
                sums.iter().zip(before).map(|(&sum, x)| if accumulate { sum + x } else { sum }).collect()
            };
            let folded = [fold(0, None, f32::max), fold(0, None, add), fold(items - 1, None, add)];
            (0..items).map(reduced).chain(folded).map(|values| bits(&values)).collect::<Vec<_>>()
        };
        let at_once = found(usize::MAX);
        for ran in [&at_once, &found(most)] {
            for (rank, ((dests, floats), traffic)) in ran.iter().enumerate() {
                prop_assert!((0..items).all(|item| dests[item] == full(item)));
                let floats: Vec<_> = floats.iter().map(|values| bits(values)).collect();
                prop_assert_eq!(floats, expected(rank));
                prop_assert_eq!(traffic, &at_once[rank].1);
            }
        }
    }
}

/// Sends so many messages, then fails.
#[derive(Debug)]
struct Failing(Arc<dyn Control>, AtomicUsize);

impl Control for Failing {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn members(&self) -> &[usize] {
        self.0.members()
    }

    fn all_gather(&self, tag: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, CommError> {
        if self.1.fetch_sub(1, Ordering::Relaxed) == 0 {
            let message = "no more".to_owned();
            return Err(CommError::Failed { rank: 0, message });
        }
        self.0.all_gather(tag, bytes)
    }

    fn differing(&self, tag: &str, own: u64, of: usize) -> Result<Option<Vec<u64>>, CommError> {
        self.0.differing(tag, own, of)
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Control>, CommError> {
        self.0.split(color, key)
    }

    fn fail(&self, cause: CommError) -> CommError {
        self.0.fail(cause)
    }

    fn failure(&self) -> Option<CommError> {
        self.0.failure()
    }
}

/// Nobody has all of what the others give: bytes are where they belong before the next ones travel.
#[test]
fn what_arrives_is_written_at_once() {
    let control = threads(1, PATIENCE).swap_remove(0);
    let control = Failing(control, AtomicUsize::new(2));
    let comm = HostComm::with_most(Arc::new(control), &Cpu, 3);
    let source = Cpu.upload(&[1u8, 2, 3, 4, 5, 6]).expect("memory");
    let dest = Cpu.alloc::<u8>(6).expect("memory");
    let item = GatherItem {
        source: &source,
        dest: &dest,
        ranges: &tiling(&[6]),
    };
    let ended = comm.enqueue("", Collective::AllGather(&[item]));
    assert!(
        ended
            .expect_err("a third turn")
            .to_string()
            .contains("no more")
    );
    assert_eq!(Cpu.download(&dest).expect("memory"), [1, 2, 3, 4, 0, 0]);
}
