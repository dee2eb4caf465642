//! Data of ranks that are processes, where more is moved than can travel at once.

use std::sync::Arc;

use crate::common::{PATIENCE, bytes, tiling, values};
use lowp_comm::{
    Collective, CommError, Communicator, Control, GatherItem, GradWire, HostComm, ReduceItem,
    run_comms, threads,
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Also by ranks of a group that was split off.
    #[test]
    fn what_does_not_travel_at_once_travels_in_turn(
        lens in prop::collection::vec(0usize..60, 1..6),
        most in 20usize..200,
        split: bool,
    ) {
        let world = lens.len();
        let ranges = tiling(&lens);
        let all: usize = lens.iter().sum();
        let full = bytes(1, all);
        let run = |limit: usize| {
            let host = |control| -> Arc<dyn Communicator<Cpu>> {
                HostComm::with_most(Arc::new(Limited(control, limit)), &Cpu, limit).into()
            };
            let comms: Vec<_> = threads(world, PATIENCE).into_iter().map(host).collect();
            run_comms(comms, |rank, comm| {
                let comm = match split {
                    true => comm.split(0, rank)?,
                    false => comm,
                };
                let source = Cpu.upload(&full[ranges[rank].clone()])?;
                let dest = Cpu.alloc::<u8>(all)?;
                let item = GatherItem { source: &source, dest: &dest, ranges: &ranges };
                comm.enqueue("", Collective::AllGather(&[item]))?;
                let grad = Source::F32(Cpu.upload(&values(rank as u64, all))?);
                let out = Cpu.alloc::<f32>(lens[rank])?;
                let item = ReduceItem { grad: &grad, ranges: &ranges, out: &out, accumulate: false };
                comm.reduce_scatter(&[item], GradWire::F32)?;
                Ok::<_, CommError>((Cpu.download(&dest)?, Cpu.download(&out)?, comm.traffic()))
            })
        };
        let at_once = run(usize::MAX).expect("the ranks");
        prop_assert!(at_once.iter().all(|(found, _, _)| *found == full));
        prop_assert_eq!(run(most).expect("the ranks"), at_once);
    }
}
