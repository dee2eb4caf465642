//! Memory that was freed, and that the allocator keeps for a while.

#![expect(
    unsafe_code,
    reason = "a call of the allocator that its crate does not have"
)]

unsafe extern "C" {
    /// `mi_collect` of mimalloc, which the allocator of this program is.
    fn mi_collect(force: bool);
}

/// Gives it to the system now: large buffers of one size are of no use to those of another.
pub(crate) fn give_back() {
    // SAFETY: it may be called at any time, by any thread.
    unsafe { mi_collect(true) }
}
