//! What this crate needs of the program that it runs in: answers to signals, and its allocator.

use std::io;
use std::sync::OnceLock;

pub use crate::temporary::remove_all as remove_temporaries;

/// What a program does at some points of the work. Without hooks temporary files of a process that a signal ends are removed by the next
/// run for the same output.
#[derive(Clone, Copy, Debug)]
pub struct Hooks {
    /// Called before each temporary is made: it may install a handler of signals that end the process, which calls
    /// [`remove_temporaries`].
    pub before_temporary: fn() -> io::Result<()>,
    /// Called before an input is mapped: it may install a handler of SIGBUS, by which the system answers a read of a file that another
    /// process made shorter.
    pub before_map: fn(),
    /// Called when large buffers were freed and others of another size come next: it may have the allocator give them to the system.
    pub after_free: fn(),
}

static HOOKS: OnceLock<Hooks> = OnceLock::new();

/// Sets the hooks of this process, once. Returns whether it did: where hooks are set already they stay.
#[must_use = "hooks that were set before stay"]
pub fn set_hooks(hooks: Hooks) -> bool {
    HOOKS.set(hooks).is_ok()
}

/// Those that are set, or some that do nothing.
pub(crate) fn hooks() -> Hooks {
    HOOKS.get().copied().unwrap_or(Hooks {
        before_temporary: || Ok(()),
        before_map: || {},
        after_free: || {},
    })
}
