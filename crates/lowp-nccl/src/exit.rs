//! The end of a process of which a thread is still in NCCL: a join that waits for a rank that will never come cannot be called off.

#![expect(unsafe_code, reason = "registers what runs at the end of the process")]

use std::ffi::{c_int, c_void};
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads that are in NCCL, and that nobody waits for.
static ABANDONED: AtomicUsize = AtomicUsize::new(0);

/// Counts its thread as one that nobody waits for until it is dropped.
#[derive(Debug)]
pub(crate) struct Abandoned(());

impl Abandoned {
    /// Has the process end without the destructors of its libraries while such a thread runs: they would free what it uses, and the exit
    /// code would be that of a segmentation fault.
    pub(crate) fn new() -> Self {
        static REGISTERED: Once = Once::new();
        REGISTERED.call_once(register);
        ABANDONED.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Abandoned {
    fn drop(&mut self) {
        ABANDONED.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn register() {
    unsafe extern "C" {
        fn on_exit(call: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
        fn fflush(stream: *mut c_void) -> c_int;
        fn _exit(code: c_int) -> !;
    }
    extern "C" fn end(code: c_int, _: *mut c_void) {
        if ABANDONED.load(Ordering::SeqCst) > 0 {
            // SAFETY: both may be called at any time; null means every stream.
            unsafe {
                fflush(std::ptr::null_mut());
                _exit(code);
            }
        }
    }
    // SAFETY: `end` is there for as long as the process. If it cannot be registered, the process ends as it would without it.
    let _registered = unsafe { on_exit(end, std::ptr::null_mut()) };
}

/// Other C libraries do not tell the exit code.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn register() {}

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    use std::process::{Command, exit};

    use super::*;

    /// Says how the process of this test is to end.
    const ENDS: &str = "LOWP_NCCL_TEST_ENDS";

    unsafe extern "C" {
        fn atexit(call: extern "C" fn()) -> c_int;
        fn abort() -> !;
    }

    /// A library whose memory is in use.
    extern "C" fn destructor() {
        // SAFETY: ends the process.
        unsafe { abort() }
    }

    /// The exit code of a process that ends so; `None` where a signal ended it.
    fn code_of(ends: &str) -> Option<i32> {
        let program = std::env::current_exe().expect("this program");
        let mut command = Command::new(program);
        command.args([
            "--exact",
            "exit::tests::the_exit_code_is_that_of_the_program",
            "--nocapture",
        ]);
        command
            .env(ENDS, ends)
            .output()
            .expect("a process")
            .status
            .code()
    }

    #[test]
    #[expect(clippy::exit, reason = "the end of a process is what is tested")]
    fn the_exit_code_is_that_of_the_program() {
        let Ok(ends) = std::env::var(ENDS) else {
            assert_eq!(code_of("abandoned"), Some(3));
            // Without such a thread, or after its end, destructors run.
            assert_eq!(code_of("finished"), None);
            return;
        };
        // SAFETY: the function is there for as long as the process.
        assert_eq!(unsafe { atexit(destructor) }, 0);
        let abandoned = Abandoned::new();
        if ends == "finished" {
            drop(abandoned);
        }
        exit(3);
    }
}
