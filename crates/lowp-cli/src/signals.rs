//! Signals that end the process: something is tidied up first, then they end it as they would have.

use lowp_checkpoint::remove_unfinished;
#[cfg(target_os = "linux")]
use lowp_file::lost_pages;
use lowp_file::process::remove_temporaries;
use signal_hook::consts::{
    SIGABRT, SIGALRM, SIGHUP, SIGINT, SIGPROF, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM,
    SIGXCPU, SIGXFSZ,
};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use signal_hook::low_level::{emulate_default_handler, exit};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

/// Signals that end a process that does nothing about them, and that it can survive for a moment. Job schedulers send
/// SIGUSR1 or SIGUSR2 before a job's time is over, watchdogs SIGABRT.
const ENDING: [i32; 11] = [
    SIGABRT, SIGALRM, SIGHUP, SIGINT, SIGPROF, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGVTALRM,
    SIGXCPU,
];

/// How long a process that a signal ends removes checkpoints. Job schedulers kill it half a minute after the signal.
const PATIENCE: Duration = Duration::from_secs(10);

/// Makes a write beyond the largest file that is allowed (`ulimit -f`) an error of that write, like a full disk, in the whole process. A
/// signal would end it without a word, in whatever it does.
pub(crate) fn survive_large_files() -> io::Result<()> {
    // The flag is of no interest: with a handler of any kind the write returns an error.
    flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))).map(drop)
}

/// Removes what this process has not finished, outputs and checkpoints, when a signal ends it. Only the first call has an effect.
///
/// Signals that the parent process had us ignore, as `nohup` does, stay ignored.
pub(crate) fn listen() -> io::Result<()> {
    static LISTENING: Mutex<bool> = Mutex::new(false);
    let mut listening = LISTENING.lock().unwrap_or_else(PoisonError::into_inner);
    if *listening {
        return Ok(());
    }
    let [ignored, blocked] = ignored_and_blocked();
    let signals = ENDING.into_iter().filter(|&signal| !is_in(ignored, signal));
    // A second one ends the process at once.
    let ending = Arc::new(AtomicBool::new(false));
    for signal in signals.clone() {
        flag::register_conditional_default(signal, Arc::clone(&ending))?;
    }
    let mut signals = Signals::new(signals)?;
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            if let Some(signal) = signals.forever().next() {
                #[cfg(target_os = "linux")]
                lost_pages::is_awake();
                ending.store(true, Ordering::Relaxed);
                let _no_others = remove_temporaries();
                remove_checkpoints();
                #[cfg(target_os = "linux")]
                if lost_pages::happened() {
                    exit(lost_pages::EXIT);
                }
                // The parent, a shell most often, sees a process that died of the signal. This does not return.
                let _ = emulate_default_handler(signal);
            }
        })
        .map_err(|e| no_thread("the thread that waits for signals", &e))?;
    let heard = |signal: &i32| !is_in(ignored | blocked, *signal);
    let _heard = ENDING.into_iter().find(heard);
    #[cfg(target_os = "linux")]
    lost_pages::wake_by(_heard.unwrap_or(0));
    *listening = true;
    Ok(())
}

/// Removes unfinished checkpoints for as long as [`PATIENCE`]: their file system may not answer. No others are begun until the process ends.
fn remove_checkpoints() {
    let (removing, removed) = mpsc::channel::<()>();
    let started = thread::Builder::new().spawn(move || {
        let _no_others = remove_unfinished();
        drop(removing);
        loop {
            thread::park();
        }
    });
    // Where no thread can be started, the next run removes them.
    if started.is_ok() {
        let _ = removed.recv_timeout(PATIENCE);
    }
}

/// The signals that this process ignores, and those that this thread, and those it starts, do not get, one bit each, as Linux tells them.
/// Elsewhere none are known.
fn ignored_and_blocked() -> [u64; 2] {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    ["SigIgn:", "SigBlk:"].map(|name| parse_set(&status, name))
}

fn parse_set(status: &str, name: &str) -> u64 {
    let bits = status.lines().find_map(|line| line.strip_prefix(name));
    bits.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok())
        .unwrap_or(0)
}

/// Whether the bit of `signal` is set; signals count from 1.
fn is_in(set: u64, signal: i32) -> bool {
    u32::try_from(signal - 1)
        .ok()
        .and_then(|bit| set.checked_shr(bit))
        .is_some_and(|rest| rest & 1 == 1)
}

/// The error of threads that the system does not start.
fn no_thread(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(
        error.kind(),
        format!(
            "{what} could not be started: {error}; raise the limit of processes (ulimit -u), or end other processes"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_of_signals_are_read() {
        let status = "Name:\tlowp\nSigBlk:\tffff\nSigIgn:\t0000000000000001\nSigCgt:\t2\n";
        let ignored = parse_set(status, "SigIgn:");
        assert!(is_in(ignored, SIGHUP) && !is_in(ignored, SIGINT) && !is_in(ignored, SIGTERM));
        assert_eq!(parse_set(status, "SigBlk:"), 0xffff);
        assert_eq!(parse_set("", "SigIgn:"), 0);
        assert!(is_in(1 << 14, SIGTERM));
    }
}
