//! [`Reused`] and [`DoubleBuffer`]: buffers that are used again.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// A buffer that tensors of one size fill one after the other: memory that is new costs as much as what is done with it.
#[derive(Debug)]
pub(crate) struct Reused<T>(RefCell<Option<T>>);

impl<T> Default for Reused<T> {
    fn default() -> Self {
        Self(RefCell::new(None))
    }
}

impl<T: Clone> Reused<T> {
    /// The buffer, if it is one that `fits`, else the one that `make` makes. Whoever had it before is done.
    pub(crate) fn take<E>(
        &self,
        fits: impl Fn(&T) -> bool,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut kept = self.0.borrow_mut();
        if let Some(kept) = kept.as_ref().filter(|kept| fits(kept)) {
            return Ok(kept.clone());
        }
        // Room for the next one first.
        *kept = None;
        let made = make()?;
        *kept = Some(made.clone());
        Ok(made)
    }

    /// Lets go of a buffer that does not fit. Whether there was one.
    pub(crate) fn keep(&self, fits: impl Fn(&T) -> bool) -> bool {
        self.0.borrow_mut().take_if(|kept| !fits(kept)).is_some()
    }
}

/// Two buffers that alternate: one is filled while the other is written. A buffer that someone still holds is never taken.
#[derive(Debug)]
pub(crate) struct DoubleBuffer<T> {
    buffers: [Reused<Arc<T>>; 2],
    next: Cell<usize>,
}

impl<T> Default for DoubleBuffer<T> {
    fn default() -> Self {
        Self {
            buffers: Default::default(),
            next: Cell::new(0),
        }
    }
}

impl<T> DoubleBuffer<T> {
    /// The buffer that was not taken last, if it is one that `fits` and nobody holds it, else the one that `make` makes. Without
    /// `alternate` it is always one buffer, where there is no room for two.
    pub(crate) fn take<E>(
        &self,
        alternate: bool,
        fits: impl Fn(&T) -> bool,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<Arc<T>, E> {
        let turn = match alternate {
            true => self.next.replace(1 - self.next.get()),
            false => {
                self.buffers[1].keep(|_| false);
                self.next.set(0);
                0
            }
        };
        let is_free = |kept: &Arc<T>| {
            let is_free = Arc::strong_count(kept) == 1;
            // What the last other holder did with it comes before what is done next.
            fence(Ordering::Acquire);
            is_free
        };
        self.buffers[turn].take(|kept| is_free(kept) && fits(kept), || make().map(Arc::new))
    }

    /// Lets go of buffers that do not fit. Whether there were any.
    pub(crate) fn keep(&self, fits: impl Fn(&T) -> bool) -> bool {
        let [first, second] = &self.buffers;
        first.keep(|kept| fits(kept)) | second.keep(|kept| fits(kept))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    /// Buffers alternate, and one that someone holds is left to them.
    #[test]
    fn no_buffer_has_two_holders() -> Result<(), Infallible> {
        let buffers = DoubleBuffer::default();
        let made = Cell::new(0);
        let make = || {
            made.set(made.get() + 1);
            Ok::<_, Infallible>(made.get())
        };
        let take = || buffers.take(true, |_| true, make);
        let taken = || take().map(|buffer| *buffer);
        assert_eq!([taken()?, taken()?, taken()?, taken()?], [1, 2, 1, 2]);
        let held = take()?;
        let second = take()?;
        assert_eq!([*held, *second], [1, 2]);
        // Its turn again, and it is still held.
        let third = take()?;
        assert_eq!([*held, *third], [1, 3]);
        drop((held, second, third));
        assert_eq!([taken()?, taken()?], [2, 3]);
        let one = buffers.take(false, |_| true, make)?;
        assert_eq!([*one, *buffers.take(false, |_| true, make)?], [3, 4]);
        drop(one);
        buffers.keep(|_| false);
        assert_eq!(taken()?, 5);
        Ok(())
    }
}
