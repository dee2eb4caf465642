//! [`GatherCalls`]: which gathers a rank made, in one order over all of its pools.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use lowp_comm::CallOrder;

/// The numbers of groups, and the order of their gathers.
#[derive(Debug, Default)]
pub(super) struct GatherCalls {
    groups: AtomicU64,
    /// Gathers since they were compared, by the ranks that make them.
    gathered: Mutex<Vec<(Vec<usize>, CallOrder)>>,
}

impl GatherCalls {
    /// The number of a new group.
    pub(super) fn next_group(&self) -> u64 {
        self.groups.fetch_add(1, Ordering::Relaxed)
    }

    /// Notes a gather that these ranks make.
    pub(super) fn note(&self, members: &[usize], item: u64) {
        let mut gathered = self.lock();
        match gathered.iter_mut().find(|(known, _)| known == members) {
            Some((_, order)) => order.push(item),
            None => {
                let mut order = CallOrder::default();
                order.push(item);
                gathered.push((members.to_vec(), order));
            }
        }
    }

    /// The gathers that these ranks made since the last time.
    pub(super) fn take(&self, members: &[usize]) -> CallOrder {
        let mut gathered = self.lock();
        let known = gathered.iter().position(|(known, _)| known == members);
        known.map_or_else(CallOrder::default, |at| gathered.swap_remove(at).1)
    }

    /// Changes under this lock are whole.
    fn lock(&self) -> MutexGuard<'_, Vec<(Vec<usize>, CallOrder)>> {
        self.gathered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
