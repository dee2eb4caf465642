//! A handler of SIGBUS for programs that map inputs: pages of a file that another process makes shorter are gone, the system answers the read with
//! SIGBUS, and no error can be returned. [`Hooks::before_map`](crate::process::Hooks::before_map) may be [`watch`].
//!
//! One line is written, temporaries and unfinished checkpoints are removed, and the exit code is that of an input that cannot be read. Reasons:
//! docs/decisions/0007-temporaries.md.
//!
//! Elsewhere the process dies of the signal.

#![expect(unsafe_code, reason = "a handler of a signal that is no message")]

use libc::{c_int, c_void, siginfo_t};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// The exit code of an input that cannot be read.
pub const EXIT: i32 = 2;

const LINE: &[u8] = b"error: an input file became shorter while it was read, or its disk failed (wait until no program \
    writes the file, and run the command again)\n";
/// What the system says of a page that is not there.
const BUS_ADRERR: c_int = 2;
/// Seconds that tidying may take.
const PATIENCE: u32 = 60;

/// No signal: nobody is to be woken.
const AWAKE: c_int = -1;

static HAPPENED: AtomicBool = AtomicBool::new(false);
static WAKE: AtomicI32 = AtomicI32::new(0);

/// Says that `signal` wakes a thread of this process that tidies, asks [`happened`] and ends the process.
pub fn wake_by(signal: c_int) {
    WAKE.store(signal, Ordering::Release);
}

/// Says that this thread tidies already.
pub fn is_awake() {
    WAKE.store(AWAKE, Ordering::Release);
}

/// Whether a page was not there.
pub fn happened() -> bool {
    HAPPENED.load(Ordering::Acquire)
}

/// Installs the handler, once.
pub fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = answer;
        // SAFETY: all zeros are an action without flags and with an empty mask.
        let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the action is whole, and its handler does only what a handler may. Where it is not taken, the process dies of the
        // signal as before.
        unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) };
    });
}

/// Runs on the thread that read the page, and does not return to it.
extern "C" fn answer(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the system gives a valid pointer, and every call is one that POSIX allows in a handler.
    unsafe {
        if (*info).si_code != BUS_ADRERR {
            // Sent by a process, or another failure of memory: the process dies of it when this returns.
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
            return;
        }
        // Other threads may read such pages, too: one is enough.
        if !HAPPENED.swap(true, Ordering::AcqRel) {
            libc::write(libc::STDERR_FILENO, LINE.as_ptr().cast(), LINE.len());
            match WAKE.load(Ordering::Acquire) {
                0 => libc::_exit(EXIT),
                AWAKE => {}
                wake => drop(libc::kill(libc::getpid(), wake)),
            }
        }
        for _ in 0..PATIENCE {
            libc::sleep(1);
        }
        libc::_exit(EXIT)
    }
}
