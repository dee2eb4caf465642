//! [`World`]: processes of examples/rank_loop.rs, what they say, and how they end.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Processes start, meet and join NCCL in this time, or have failed to; on a machine that does other things, too.
const START: Duration = Duration::from_secs(90);

/// All ranks have ended this long after one failed.
pub(crate) const END: Duration = Duration::from_secs(30);

const NAP: Duration = Duration::from_millis(5);

/// Where ranks work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// `--device`.
    pub(crate) device: &'static str,
    pub(crate) ranks: usize,
    /// How many of them each machine has, as their launcher says.
    pub(crate) nodes: &'static [usize],
    /// `--width`.
    pub(crate) width: usize,
    /// `--limit` where a case waits for it to be over: all ranks start, and do what they do between two waits, in that time.
    pub(crate) limit: u64,
}

impl Place {
    pub(crate) fn last(&self) -> usize {
        self.ranks - 1
    }

    /// The first rank of each machine, and the last of all.
    pub(crate) fn victims(&self) -> Vec<usize> {
        let firsts = (0..self.ranks).filter(|&rank| self.local_rank(rank) == 0);
        firsts.chain([self.last()]).collect()
    }

    fn local_rank(&self, rank: usize) -> usize {
        let seats = self.nodes.iter().flat_map(|&size| 0..size);
        { seats }.nth(rank).unwrap_or(rank)
    }
}

/// A port that nobody has: of this process's own, below those that the system gives to connections.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let tried = std::iter::repeat_with(|| {
        let own = std::process::id().wrapping_mul(41);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        10_000 + (own.wrapping_add(next) % 20_000) as u16
    });
    let mut free = tried.filter(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    free.next().expect("a free port")
}

/// The program of a rank: `LOWP_RANK_LOOP`, or where it is packed or built with this one.
fn program() -> PathBuf {
    if let Some(path) = std::env::var_os("LOWP_RANK_LOOP") {
        return path.into();
    }
    let own = std::env::current_exe().expect("a path");
    let folder = own.parent().expect("a folder");
    let places = ["rank_loop", "../examples/rank_loop"].map(|place| folder.join(place));
    let found = places.into_iter().find(|path| path.is_file());
    found.unwrap_or_else(|| {
        panic!(
            "no rank_loop beside {}; build it with the features of this test: cargo build -p lowp-nccl --example rank_loop",
            own.display()
        )
    })
}

/// One process, killed when it is dropped.
#[derive(Debug)]
pub(crate) struct Rank {
    number: usize,
    child: Child,
    out: Arc<Mutex<String>>,
    err: Arc<Mutex<String>>,
    readers: Vec<thread::JoinHandle<()>>,
    ended: Option<ExitStatus>,
}

/// Reads the lines of `pipe` until it ends.
fn read(pipe: impl Read + Send + 'static) -> (Arc<Mutex<String>>, thread::JoinHandle<()>) {
    let text = Arc::new(Mutex::new(String::new()));
    let lines = Arc::clone(&text);
    let reader = thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            *lines.lock().expect("no panic") += &(line + "\n");
        }
    });
    (text, reader)
}

impl Rank {
    fn start(number: usize, mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let (out, reads_out) = read(child.stdout.take().expect("a pipe"));
        let (err, reads_err) = read(child.stderr.take().expect("a pipe"));
        Self {
            number,
            child,
            out,
            err,
            readers: vec![reads_out, reads_err],
            ended: None,
        }
    }

    pub(crate) fn out(&self) -> String {
        self.out.lock().expect("no panic").clone()
    }

    pub(crate) fn err(&self) -> String {
        self.err.lock().expect("no panic").clone()
    }

    /// Whether it ended; all that it said is there then.
    fn has_ended(&mut self) -> bool {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().expect("a process");
            if self.ended.is_some() {
                let readers = self.readers.drain(..);
                readers.for_each(|reader| reader.join().expect("no panic"));
            }
        }
        self.ended.is_some()
    }

    /// Waits for its end, until `deadline`.
    fn end(&mut self, deadline: Instant) {
        while !self.has_ended() {
            assert!(Instant::now() < deadline, "no end of {}", self.report());
            thread::sleep(NAP);
        }
    }

    fn code(&self) -> Option<i32> {
        self.ended.and_then(|status| status.code())
    }

    fn report(&self) -> String {
        let (number, ended) = (self.number, self.ended);
        format!("rank {number} ({ended:?}): {}{}", self.out(), self.err())
    }

    /// Sends it `signal`, as the shell names it.
    fn signal(&self, signal: &str) {
        let line = format!("kill -{signal} {}", self.child.id());
        let sent = Command::new("sh").args(["-c", &line]).status();
        assert!(sent.expect("a shell").success(), "{line}");
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if self.ended.is_none() {
            let _gone = self.child.kill();
            let _gone = self.child.wait();
        }
    }
}

/// The processes of one world.
#[derive(Debug)]
pub(crate) struct World {
    ranks: Vec<Rank>,
    /// When they were started, or one of them was sent a signal.
    since: Instant,
    /// How long their end may take from then on.
    within: Duration,
}

impl World {
    /// Starts a process for each of `ranks`; `change` says what is special about it.
    pub(crate) fn start(
        place: &Place,
        ranks: impl IntoIterator<Item = usize>,
        port: u16,
        change: impl Fn(usize, &mut Command),
    ) -> Self {
        let program = program();
        let start = |rank: usize| {
            let mut command = Command::new(&program);
            command
                .args(["--device", place.device])
                .args(["--width", &place.width.to_string()])
                .env("RANK", rank.to_string())
                .env("LOCAL_RANK", place.local_rank(rank).to_string())
                .env("WORLD_SIZE", place.ranks.to_string())
                .env("LOCAL_WORLD_SIZE", place.ranks.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string())
                .env_remove("LOWP_MASTER_PORT")
                .env_remove("TORCHELASTIC_USE_AGENT_STORE");
            change(rank, &mut command);
            Rank::start(rank, command)
        };
        let ranks = ranks.into_iter().map(start).collect();
        Self {
            ranks,
            since: Instant::now(),
            within: START,
        }
    }

    fn rank(&mut self, number: usize) -> &mut Rank {
        let found = self.ranks.iter_mut().find(|rank| rank.number == number);
        found.expect("a rank that was started")
    }

    /// Waits until the `ranks` have said `text`.
    pub(crate) fn say(&mut self, ranks: impl IntoIterator<Item = usize>, text: &str) {
        let deadline = Instant::now() + START;
        for number in ranks {
            let rank = self.rank(number);
            while !rank.out().contains(text) {
                let waits = !rank.has_ended() && Instant::now() < deadline;
                assert!(
                    waits || rank.out().contains(text),
                    "no '{text}' of {}",
                    rank.report()
                );
                thread::sleep(NAP);
            }
        }
    }

    pub(crate) fn signal(&mut self, rank: usize, signal: &str) {
        (self.since, self.within) = (Instant::now(), END);
        self.rank(rank).signal(signal);
    }

    /// Kills a rank, and returns those that are left.
    pub(crate) fn kill(mut self, number: usize) -> Self {
        self.signal(number, "KILL");
        self.rank(number).end(Instant::now() + END);
        self.ranks.retain(|rank| rank.number != number);
        self
    }

    /// All ranks but `but` must end in time with code 1 and `text` on standard error. Returns how long it took, as `end`.
    pub(crate) fn fail(&mut self, but: Option<usize>, text: impl Fn(usize) -> String) -> Duration {
        self.end(but, 1, |rank| {
            let text = text(rank.number);
            assert!(
                rank.err().contains(&text),
                "no '{text}' of {}",
                rank.report()
            );
        })
    }

    /// All ranks but `but` must end in time with code `code`. Returns how long it took since the start, or the last signal.
    pub(crate) fn end(&mut self, but: Option<usize>, code: i32, check: impl Fn(&Rank)) -> Duration {
        let (ranks, deadline) = (self.ranks.iter_mut(), self.since + self.within);
        for rank in ranks.filter(|rank| Some(rank.number) != but) {
            rank.end(deadline);
            assert_eq!(rank.code(), Some(code), "{}", rank.report());
            check(rank);
        }
        self.since.elapsed()
    }
}
