//! The first rank of a machine as the relay of the others: when it goes, and when they do.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, launches_on};
use lowp_comm::{CommError, Control, Launch, join};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Rank 0, ranks 1 and 2 of one machine, rank 3.
fn launches() -> Vec<Launch> {
    launches_on([1, 2, 1], 4, PATIENCE)
}

/// A connection that a rank of this test speaks over by itself.
struct Bare(TcpStream);

impl Bare {
    /// Connects to `address`, and exchanges greetings.
    fn connect(address: &str) -> Self {
        loop {
            match TcpStream::connect(address) {
                Ok(stream) => return Self::greet(stream),
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    fn greet(mut stream: TcpStream) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream.set_nodelay(true).expect("a socket");
        stream.write_all(b"lowp\0\x04\0\0").expect("a greeting");
        stream.read_exact(&mut [0; 8]).expect("a greeting");
        Self(stream)
    }

    fn say(&mut self, message: &impl Serialize) {
        let body = postcard::to_stdvec(message).expect("a message");
        let frame = [&(body.len() as u32).to_le_bytes(), &*body].concat();
        self.0.write_all(&frame).expect("rank 0 or a relay");
    }

    /// Says who it is: a rank with its number on the machine, of a run, and the port that others reach it at.
    fn hello(&mut self, rank: usize, run: &str, local_rank: usize, port: u16) {
        self.hello_of((4, "tests", run), rank, local_rank, port);
    }

    /// The same of a world and a build.
    fn hello_of(
        &mut self,
        (world, build, run): (usize, &str, &str),
        rank: usize,
        local_rank: usize,
        port: u16,
    ) {
        self.say(&(rank, world, build, run, 0u64, local_rank, port));
    }

    /// The next message, and what is behind it.
    fn hear<T: DeserializeOwned>(&mut self) -> (T, Vec<u8>) {
        let mut len = [0; 4];
        self.0.read_exact(&mut len).expect("a length");
        let mut body = vec![0; u32::from_le_bytes(len) as usize];
        self.0.read_exact(&mut body).expect("a body");
        let (message, rest) = postcard::take_from_bytes(&body).expect("a message");
        (message, rest.to_vec())
    }
}

/// Requests and answers by their numbers.
const FAIL: u32 = 2;
const SERVES: u32 = 4;
const STAYS: u32 = 5;
const READY: u32 = 0;
const FAILED: u32 = 7;
const RELAY: u32 = 8;
const PASS: u32 = 9;
const NOT_HERE: u32 = 10;

/// The errors of `ranks`, while the others are what `bare` does.
fn errors(
    launches: &[Launch],
    ranks: &[usize],
    bare: impl FnOnce() + Send,
) -> Vec<(usize, String)> {
    thread::scope(|scope| {
        let run = |&rank: &usize| {
            let launch = &launches[rank];
            scope.spawn(move || join(launch).and_then(|rank| rank.barrier()))
        };
        let ranks: Vec<_> = ranks.iter().map(|rank| (*rank, run(rank))).collect();
        scope.spawn(bare);
        let error = |(rank, run): (usize, thread::ScopedJoinHandle<'_, _>)| {
            let ended: Result<(), CommError> = run.join().expect("no panic");
            (rank, ended.expect_err("a rank is gone").to_string())
        };
        ranks.into_iter().map(error).collect()
    })
}

/// When a relay goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum Phase {
    /// It has connected to rank 0.
    Met,
    /// It was told that it is a relay.
    Told,
    /// The rank of its machine came.
    Served,
    /// All ranks are where they belong.
    Ready,
    /// A rank of its machine waits in a call.
    InCall,
}

/// Does what a relay does with one rank, up to `phase`.
fn relay(address: &str, phase: Phase) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = listener.local_addr().expect("its number").port();
    let mut first = Bare::connect(address);
    first.hello(1, "", 0, port);
    if phase == Phase::Met {
        return;
    }
    assert_eq!(first.hear(), ((RELAY, 1usize, port), Vec::new()));
    if phase == Phase::Told {
        return;
    }
    let mut rank = Bare::greet(listener.accept().expect("a rank").0);
    let (who, _): ((usize, usize), _) = rank.hear();
    assert_eq!(who, (2, 4));
    if phase == Phase::Served {
        first.say(&(SERVES, 2usize));
        return;
    }
    first.say(&(SERVES, 1usize));
    first.say(&(SERVES, 2usize));
    let (pass, ready): ((u32, Vec<usize>, Option<usize>), _) = first.hear();
    assert_eq!(pass, (PASS, vec![1, 2], Some(0)));
    rank.0.write_all(&ready).expect("a rank");
    if phase == Phase::InCall {
        let (group, _): ((u32, usize), _) = rank.hear();
        assert_eq!(group, (0, 0));
    }
}

#[test]
fn a_relay_that_is_killed_is_named_by_all() {
    for phase in [
        Phase::Met,
        Phase::Told,
        Phase::Served,
        Phase::Ready,
        Phase::InCall,
    ] {
        let launches = launches();
        let address = launches[0].address();
        let begun = Instant::now();
        for (rank, text) in errors(&launches, &[0, 2, 3], || relay(&address, phase)) {
            let named = text.contains("rank 1 lost its connection");
            assert!(named, "{phase:?}, rank {rank}: {text}");
        }
        let seconds = begun.elapsed().as_secs_f64();
        eprintln!("{phase:?}: all others ended in {seconds:.2} s");
        assert!(seconds < 30.0, "{phase:?}");
    }
}

/// Ranks that do not reach their relay, or reach that of another run, stay with rank 0.
#[test]
fn a_relay_may_be_out_of_reach() {
    for of_another_run in [false, true] {
        without_their_relay(of_another_run);
    }
}

/// A world whose rank 2 finds nobody where its relay should be, or the relay of another run.
fn without_their_relay(of_another_run: bool) {
    let launches = launches();
    let address = launches[0].address();
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = listener.local_addr().expect("its number").port();
    // Nobody listens at port 1.
    let port = if of_another_run { port } else { 1 };
    let (met, met_all) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        for launch in [&launches[0], &launches[2], &launches[3]] {
            let met = met.clone();
            scope.spawn(move || {
                let rank = join(launch).expect("a world");
                met.send(()).expect("the test");
                let error = rank.barrier().expect_err("rank 1 is gone").to_string();
                assert!(error.contains("rank 1 lost its connection"), "{error}");
            });
        }
        let mut bare = Bare::connect(&address);
        bare.hello(1, "", 0, port);
        assert_eq!(bare.hear(), ((RELAY, 1usize, port), Vec::new()));
        if of_another_run {
            let mut rank = Bare::greet(listener.accept().expect("a rank").0);
            let (who, _): ((usize, usize), _) = rank.hear();
            assert_eq!(who, (2, 4));
            rank.say(&NOT_HERE);
        }
        bare.say(&STAYS);
        assert_eq!(bare.hear(), (READY, Vec::new()));
        for _ in 0..3 {
            met_all.recv_timeout(PATIENCE).expect("all have met");
        }
    });
}

/// A world whose rank 2, which speaks by a relay, does what `end` says with its connection: the errors of the others.
fn with_a_bare_rank(end: impl FnOnce(TcpStream) + Send) -> Vec<String> {
    let launches = launches();
    let address = launches[0].address();
    let bare = || {
        let mut first = Bare::connect(&address);
        first.hello(2, "", 1, 0);
        let ((answer, relay, port), _): ((u32, usize, u16), _) = first.hear();
        assert_eq!((answer, relay), (RELAY, 1));
        let address = format!("127.0.0.1:{port}");
        // What is of another run, build or world does no harm, and goes elsewhere.
        for of in [
            (4, "tests", "another"),
            (4, "another", ""),
            (5, "tests", ""),
        ] {
            let mut stranger = Bare::connect(&address);
            stranger.hello_of(of, 2, 1, 0);
            assert_eq!(stranger.hear::<u32>().0, NOT_HERE);
        }
        let mut near = Bare::connect(&address);
        near.hello(2, "", 1, 0);
        assert_eq!(near.hear(), (READY, Vec::new()));
        let mut again = Bare::connect(&address);
        again.hello(2, "", 1, 0);
        let (failed, why): (u32, _) = again.hear();
        assert_eq!(failed, FAILED);
        let why = String::from_utf8_lossy(&why).into_owned();
        assert!(
            why.contains("two processes say they are rank 2 to rank 1"),
            "{why}"
        );
        end(near.0);
    };
    let errors = errors(&launches, &[0, 1, 3], bare);
    errors.into_iter().map(|(_, text)| text).collect()
}

#[test]
fn a_rank_of_a_relay_that_is_killed_is_named_by_all() {
    for text in with_a_bare_rank(drop) {
        assert!(text.contains("rank 2 lost its connection"), "{text}");
    }
}

#[test]
fn what_is_no_message_is_named_by_the_relay() {
    let frames: [&[u8]; 3] = [
        &[255; 64],
        &[2, 0, 0, 0, 99, 99],
        // It closes a group that nobody made.
        &[3, 0, 0, 0, 1, 77, 0],
    ];
    for frame in frames {
        let texts = with_a_bare_rank(|mut stream| {
            stream.write_all(frame).expect("a frame");
            // Until it hears what others think of it.
            let _gone = stream.read(&mut [0; 64]);
        });
        for text in texts {
            assert!(text.contains("rank 2 failed: rank 1 heard "), "{text}");
        }
    }
}

/// A relay that its own rank does not reach ends, and rank 0 hears why.
#[test]
fn a_relay_ends_with_its_own_rank() {
    let launch = launches().swap_remove(1);
    let listener = TcpListener::bind(launch.address()).expect("a port");
    let begun = Instant::now();
    thread::scope(|scope| {
        let rank = scope.spawn(|| join(&launch).expect_err("no relay").to_string());
        let mut first = Bare::greet(listener.accept().expect("a rank").0);
        let (who, _): ((usize, usize), _) = first.hear();
        assert_eq!(who, (1, 4));
        // Nobody listens there.
        first.say(&(RELAY, 1usize, 1u16));
        let (request, why): (u32, _) = first.hear();
        assert_eq!(request, FAIL);
        let error = rank.join().expect("no panic");
        for text in [&*error, &*String::from_utf8_lossy(&why)] {
            assert!(text.contains("it does not reach itself"), "{text}");
        }
        // The thread is gone, and so is its connection.
        assert_eq!(first.0.read(&mut [0]).expect("an end"), 0);
    });
    assert!(
        begun.elapsed() < Duration::from_secs(4),
        "{:?}",
        begun.elapsed()
    );
}

/// The ranks of a relay go on when its own rank has gone.
#[test]
fn a_relay_waits_for_its_ranks() {
    let launches = launches_on([1, 3, 1], 4, PATIENCE);
    let gone = AtomicBool::new(false);
    thread::scope(|scope| {
        let gone = &gone;
        for launch in &launches {
            scope.spawn(move || {
                let rank: Arc<dyn Control> = join(launch).expect("a world");
                let group = rank
                    .split(usize::from(launch.rank == 1), 0)
                    .expect("groups");
                drop(rank);
                if launch.rank == 1 {
                    drop(group);
                    gone.store(true, Ordering::SeqCst);
                    return;
                }
                thread::sleep(Duration::from_millis(50));
                group.barrier().expect("the others");
                assert!(!gone.load(Ordering::SeqCst));
                // All have looked before one goes.
                group.barrier().expect("the others");
            });
        }
    });
}
