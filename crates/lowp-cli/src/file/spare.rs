//! [`Spare`] and [`Turns`]: buffers that are used again.

use std::cell::{Cell, RefCell};

/// A buffer that tensors of one size fill one after the other: memory that is new costs as much as what is done with it.
#[derive(Debug)]
pub(super) struct Spare<T>(RefCell<Option<T>>);

impl<T> Default for Spare<T> {
    fn default() -> Self {
        Self(RefCell::new(None))
    }
}

impl<T: Clone> Spare<T> {
    /// The buffer, if it is one that `fits`, else the one that `make` makes. Whoever had it before is done.
    ///
    /// # Errors
    /// Whatever `make` returns.
    pub(super) fn take<E>(
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

    /// Lets go of the buffer.
    pub(super) fn release(&self) {
        *self.0.borrow_mut() = None;
    }
}

/// Two buffers in turn: one is filled while the other is written.
#[derive(Debug)]
pub(super) struct Turns<T> {
    spares: [Spare<T>; 2],
    next: Cell<usize>,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self {
            spares: Default::default(),
            next: Cell::new(0),
        }
    }
}

impl<T: Clone> Turns<T> {
    /// As [`Spare::take`], of the buffer that was not taken last.
    ///
    /// # Errors
    /// Whatever `make` returns.
    pub(super) fn take<E>(
        &self,
        fits: impl Fn(&T) -> bool,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let turn = self.next.replace(1 - self.next.get());
        self.spares[turn].take(fits, make)
    }

    /// Lets go of buffers that do not fit.
    pub(super) fn keep(&self, fits: impl Fn(&T) -> bool) {
        for spare in &self.spares {
            let mut kept = spare.0.borrow_mut();
            if kept.as_ref().is_some_and(|kept| !fits(kept)) {
                *kept = None;
            }
        }
    }

    /// As [`Spare::take`], always of one buffer, where there is no room for two.
    ///
    /// # Errors
    /// Whatever `make` returns.
    pub(super) fn take_one<E>(
        &self,
        fits: impl Fn(&T) -> bool,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        self.spares[1].release();
        self.next.set(0);
        self.spares[0].take(fits, make)
    }
}
