//! [`Owned`]: a handle of a C library that its owner destroys.

#![expect(unsafe_code, reason = "calls what destroys a handle")]

use std::fmt;

/// What destroys a handle. Nobody is left to hear of one that stays.
type Destroy<T, E> = unsafe fn(T) -> Result<(), E>;

/// A handle that is destroyed once: what is made of several and fails half way leaves none.
pub(crate) struct Owned<T: Copy, E> {
    raw: T,
    /// None once it was called.
    destroy: Option<Destroy<T, E>>,
}

impl<T: Copy, E> Owned<T, E> {
    /// The owner of `raw`.
    ///
    /// # Safety
    /// `destroy` may be called with `raw` by any thread when nothing uses it any more, and nobody else calls it.
    pub(crate) unsafe fn new(raw: T, destroy: Destroy<T, E>) -> Self {
        let destroy = Some(destroy);
        Self { raw, destroy }
    }

    /// The handle, which lives as long as `self`.
    pub(crate) fn raw(&self) -> T {
        self.raw
    }

    /// Destroys the handle now.
    pub(crate) fn destroy(&mut self) {
        if let Some(destroy) = self.destroy.take() {
            // SAFETY: the promise of `new`; it was not called before.
            let _ = unsafe { destroy(self.raw) };
        }
    }

    /// Keeps the handle for what may still use it.
    pub(crate) fn leak(&mut self) {
        self.destroy = None;
    }
}

impl<T: Copy + fmt::Debug, E> fmt::Debug for Owned<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.raw.fmt(f)
    }
}

impl<T: Copy, E> Drop for Owned<T, E> {
    fn drop(&mut self) {
        self.destroy();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::Owned;

    static DESTROYED: Mutex<Vec<u32>> = Mutex::new(Vec::new());

    fn destroy(raw: u32) -> Result<(), ()> {
        DESTROYED.lock().map_err(drop)?.push(raw);
        Err(())
    }

    fn made(raw: u32) -> Owned<u32, ()> {
        // SAFETY: counts calls.
        unsafe { Owned::new(raw, destroy) }
    }

    /// Three handles as a product has them, of which `fails` is not made.
    fn all(fails: u32) -> Result<[Owned<u32, ()>; 3], u32> {
        let make = |raw| match raw == fails {
            true => Err(raw),
            false => Ok(made(raw)),
        };
        Ok([make(1)?, make(2)?, make(3)?])
    }

    #[test]
    fn each_handle_is_destroyed_once_also_of_what_fails_half_way() {
        // In any order.
        let destroyed = || {
            let mut all = std::mem::take(&mut *DESTROYED.lock().unwrap());
            all.sort_unstable();
            all
        };
        assert_eq!(all(3).map(drop), Err(3));
        assert_eq!(destroyed(), [1, 2]);
        assert_eq!(all(0).map(|all| all[2].raw()), Ok(3));
        assert_eq!(destroyed(), [1, 2, 3]);
        let mut one = made(4);
        one.destroy();
        assert_eq!(destroyed(), [4]);
        drop(one);
        made(5).leak();
        assert_eq!(destroyed(), []);
    }
}
