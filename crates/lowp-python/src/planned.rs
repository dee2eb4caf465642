//! [`Planned`]: work that is planned once for what it is over, of every backend.

use std::hash::Hash;
use std::sync::{Arc, Mutex};

use lowp_kernels::Cpu;
#[cfg(feature = "cuda")]
use lowp_kernels::Cuda;

use crate::locks::lock;
use crate::place::Place;
use crate::recent::Recent;

/// A kind of work that is planned.
pub(crate) trait Planning {
    /// What work is planned over.
    type Key: Clone + Eq + Hash;
    /// Planned work of a backend.
    type Plan<B: Place>;
}

/// Plans by what they are over.
type Known<W, B> = Mutex<Recent<<W as Planning>::Key, Arc<<W as Planning>::Plan<B>>>>;

/// Plans of each backend, up to a number of them; beyond it the one that was not used for longest goes.
pub(crate) struct Planned<W: Planning> {
    cpu: Known<W, Cpu>,
    #[cfg(feature = "cuda")]
    cuda: Known<W, Cuda>,
}

/// A backend whose plans [`Planned`] keeps.
pub(crate) trait Kept: Place {
    /// Its plans.
    fn known<W: Planning>(planned: &Planned<W>) -> &Known<W, Self>;
}

impl Kept for Cpu {
    fn known<W: Planning>(planned: &Planned<W>) -> &Known<W, Self> {
        &planned.cpu
    }
}

#[cfg(feature = "cuda")]
impl Kept for Cuda {
    fn known<W: Planning>(planned: &Planned<W>) -> &Known<W, Self> {
        &planned.cuda
    }
}

impl<W: Planning> Planned<W> {
    /// No plans yet; `most` of each backend are kept.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            cpu: Mutex::new(Recent::new(most)),
            #[cfg(feature = "cuda")]
            cuda: Mutex::new(Recent::new(most)),
        }
    }

    /// The plan for `key`, if there is one, which is used by that.
    pub(crate) fn get<B: Kept>(&self, key: &W::Key) -> Option<Arc<W::Plan<B>>> {
        lock(B::known(self)).get(key).cloned()
    }

    /// The plan for `key`, which is kept no longer.
    pub(crate) fn take<B: Kept>(&self, key: &W::Key) -> Option<Arc<W::Plan<B>>> {
        lock(B::known(self)).take(key)
    }

    /// Keeps a plan. The one that goes for it ends here, where no lock is held.
    pub(crate) fn put<B: Kept>(&self, key: W::Key, plan: Arc<W::Plan<B>>) {
        let gone = lock(B::known(self)).put(key, plan);
        drop(gone);
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        let len = lock(&self.cpu).len();
        #[cfg(feature = "cuda")]
        let len = len + lock(&self.cuda).len();
        len
    }
}
