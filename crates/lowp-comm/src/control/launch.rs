//! [`Launch`]: which rank of which world this process is, as its launcher says.

use std::ffi::OsString;
use std::net::Ipv6Addr;
use std::time::Duration;

use crate::CommError;

/// The variables of one launcher: rank, number of ranks, rank on this machine.
struct Launcher {
    rank: &'static str,
    world: &'static str,
    local: &'static str,
    /// Number of ranks on this machine.
    local_world: &'static str,
}

/// `torchrun` and its like first: a job of theirs may run inside one of the others'.
const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        rank: "RANK",
        world: "WORLD_SIZE",
        local: "LOCAL_RANK",
        local_world: "LOCAL_WORLD_SIZE",
    },
    Launcher {
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    // Hydra starts its ranks within a step of Slurm, which may have one task for each node.
    Launcher {
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local: "MPI_LOCALRANKID",
        local_world: "MPI_LOCALNRANKS",
    },
    // Those of a step: a batch script alone is no rank.
    Launcher {
        rank: "SLURM_PROCID",
        world: "SLURM_STEP_NUM_TASKS",
        local: "SLURM_LOCALID",
        local_world: "SLURM_NTASKS_PER_NODE",
    },
];

/// Most ranks of a world: rank 0 has a place for each.
const MOST_RANKS: usize = 1 << 20;

/// Bytes of the longest name of a run.
const LONGEST_RUN: usize = 1024;

/// The port that launchers take where none is said.
const PORT: u16 = 29500;

/// One process of a world of processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The number of this rank in the world, from 0.
    pub rank: usize,
    /// Number of ranks of the world.
    pub world: usize,
    /// This rank among those of its machine: the number of its GPU. The first may bring the calls of the others to rank 0 ([`join`](crate::join)).
    pub local_rank: usize,
    /// Number of ranks of its machine; that of all ranks where the launcher does not say it.
    pub local_world: usize,
    /// The machine of rank 0, by name or address.
    pub host: String,
    /// The port that rank 0 listens on.
    pub port: u16,
    /// How long a rank waits for others, from the first meeting on.
    pub limit: Duration,
    /// What must be the same on every rank: the version of the program.
    pub build: String,
    /// The name of the run, the same on every rank: a process of another run that connects gets an error and is disconnected. It may be empty.
    pub run: String,
    /// How often this rank was started again, which torchrun counts for each machine by itself: of two processes that say they are one rank
    /// before all ranks are there, the one that was started again more often is it.
    pub restart: u64,
}

/// The launcher that started this process, if one did.
fn launcher(
    get: &dyn Fn(&str) -> Option<OsString>,
) -> Result<Option<&'static Launcher>, CommError> {
    // Slurm numbers batch scripts, too, which are no step; its own PMI has no local ranks.
    let names = |l: &&Launcher| {
        let also = match l.rank {
            "PMI_RANK" => get(l.local).is_some(),
            "SLURM_PROCID" => get(l.world).is_some(),
            _ => true,
        };
        get(l.rank).is_some() && also
    };
    if let Some(launcher) = LAUNCHERS.iter().find(names) {
        return Ok(Some(launcher));
    }
    // Each process would be a run of its own.
    let Launcher { rank, world, .. } = &LAUNCHERS[0];
    let several = text(get, world).filter(|value| {
        value
            .trim()
            .parse()
            .map_or(!value.trim().is_empty(), |n: usize| n > 1)
    });
    match several {
        Some(ranks) => Err(wrong(
            rank,
            "",
            &format!("it must be set beside {world}, which is {ranks}; set it, or unset {world}"),
        )),
        None => Ok(None),
    }
}

/// The text of a variable, if it is set.
fn text(get: &dyn Fn(&str) -> Option<OsString>, name: &str) -> Option<String> {
    get(name).map(|value| value.to_string_lossy().into_owned())
}

/// The environment of a rank.
struct Variables<'a> {
    get: &'a dyn Fn(&str) -> Option<OsString>,
    launcher: &'static Launcher,
}

impl Variables<'_> {
    fn text(&self, name: &str) -> Option<String> {
        text(self.get, name)
    }

    /// The number `name`; without a `default` it must be set.
    fn number(&self, name: &str, default: Option<usize>) -> Result<usize, CommError> {
        match (self.text(name), default) {
            (Some(value), _) => value.trim().parse::<usize>().map_err(|_| {
                let why = "a whole number is needed";
                wrong(name, &value, why)
            }),
            (None, Some(default)) => Ok(default),
            (None, None) => {
                let why = format!(
                    "it is not set, and has to be beside {}; set it, or start the command by a launcher",
                    self.launcher.rank
                );
                Err(wrong(name, "", &why))
            }
        }
    }

    /// The machine of rank 0.
    fn host(&self, world: usize, local_world: usize) -> Result<String, CommError> {
        let counts_local = (self.get)(self.launcher.local_world).is_some();
        let is_here = world == 1 || counts_local && local_world == world;
        let host = self
            .text("MASTER_ADDR")
            .or_else(|| {
                self.text("SLURM_STEP_NODELIST")
                    .map(|list| first_node(&list))
            })
            .or_else(|| is_here.then(|| "127.0.0.1".to_owned()));
        let Some(host) = host.filter(|host| !host.trim().is_empty()) else {
            let why = "name the machine of rank 0, the same on every rank";
            return Err(wrong("MASTER_ADDR", "", why));
        };
        // An address of IPv6 may name an interface after `%`.
        let bare = host.split('%').next().unwrap_or_default();
        if host.contains(':') && bare.parse::<Ipv6Addr>().is_err() {
            let why = "a name or an address is needed, without a port, which is MASTER_PORT";
            return Err(wrong("MASTER_ADDR", &host, why));
        }
        Ok(host)
    }

    /// The port that rank 0 listens at.
    fn port(&self) -> Result<u16, CommError> {
        let port = |name: &str, value: usize| {
            let port = u16::try_from(value).ok().filter(|&port| port > 0);
            port.ok_or_else(|| wrong(name, &value.to_string(), "a port is 1 to 65535"))
        };
        if (self.get)("LOWP_MASTER_PORT").is_some() {
            return port("LOWP_MASTER_PORT", self.number("LOWP_MASTER_PORT", None)?);
        }
        let agent = self.text("TORCHELASTIC_USE_AGENT_STORE");
        let taken = agent.is_some_and(|value| value == "True");
        let first = port(
            "MASTER_PORT",
            self.number("MASTER_PORT", Some(usize::from(PORT)))?,
        )?;
        let next = first.checked_add(u16::from(taken));
        next.ok_or_else(|| {
            let why =
                "torchrun's agent has that port, and there is none after it; set LOWP_MASTER_PORT";
            wrong("MASTER_PORT", &first.to_string(), why)
        })
    }

    /// The name of the run; empty where nothing names it.
    fn run(&self) -> Result<String, CommError> {
        let run = self
            .text("LOWP_RUN_ID")
            .or_else(|| self.text("TORCHELASTIC_RUN_ID"));
        let run = run.or_else(|| self.slurm_run()).unwrap_or_default();
        if run.len() > LONGEST_RUN {
            let why = format!("the name of a run has at most {LONGEST_RUN} bytes");
            return Err(wrong("LOWP_RUN_ID", &run, &why));
        }
        Ok(run)
    }

    /// The step of a job of Slurm. Other launchers may start ranks outside the job's own steps, which do not have all variables.
    fn slurm_run(&self) -> Option<String> {
        let by_srun = self.launcher.rank == "SLURM_PROCID";
        let mut run = self.text("SLURM_JOB_ID").filter(|_| by_srun)?;
        if let Some(step) = self.text("SLURM_STEP_ID") {
            run += &format!(".{step}");
        }
        let restarts = self.text("SLURM_RESTART_COUNT");
        if let Some(count) = restarts.filter(|count| count != "0") {
            run += &format!(" restart {count}");
        }
        Some(run)
    }
}

impl Launch {
    /// What the environment says, or `None` where it names no rank. Read are, in this order:
    /// `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` (torchrun); `OMPI_COMM_WORLD_RANK`, `.._SIZE`, `.._LOCAL_RANK`, `.._LOCAL_SIZE`
    /// (mpirun of Open MPI); `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` (mpirun of MPICH and Intel MPI); `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID`, `SLURM_NTASKS_PER_NODE` (srun). Rank 0 is found by
    /// `MASTER_ADDR` and `MASTER_PORT`; else by the first node of `SLURM_STEP_NODELIST`, or on this machine if all ranks
    /// are there; the port is 29500 then. An agent of torchrun that listens on
    /// `MASTER_PORT` itself (`TORCHELASTIC_USE_AGENT_STORE=True`) leaves the next port to the ranks.
    /// `LOWP_MASTER_PORT` names another one.
    ///
    /// The name of the run is `LOWP_RUN_ID`; else `TORCHELASTIC_RUN_ID`, or, where srun started the ranks, `SLURM_JOB_ID` with `SLURM_STEP_ID` and
    /// `SLURM_RESTART_COUNT`. Restarts are `TORCHELASTIC_RESTART_COUNT`.
    ///
    /// # Errors
    /// A variable that is missing beside others, or has a value that means nothing.
    pub fn from_env(limit: Duration, build: &str) -> Result<Option<Self>, CommError> {
        Self::from_variables(|name| std::env::var_os(name), limit, build)
    }

    fn from_variables(
        get: impl Fn(&str) -> Option<OsString>,
        limit: Duration,
        build: &str,
    ) -> Result<Option<Self>, CommError> {
        let Some(launcher) = launcher(&get)? else {
            return Ok(None);
        };
        let variables = Variables {
            get: &get,
            launcher,
        };
        let rank = variables.number(launcher.rank, None)?;
        let world = variables.number(launcher.world, None)?;
        if world > MOST_RANKS {
            let why = format!("a world has at most {MOST_RANKS} ranks");
            return Err(wrong(launcher.world, &world.to_string(), &why));
        }
        if rank >= world {
            let why = format!("{} is {world}; ranks count from 0", launcher.world);
            return Err(wrong(launcher.rank, &rank.to_string(), &why));
        }
        let local_rank = variables.number(launcher.local, Some(rank))?;
        let local_world = variables.number(launcher.local_world, Some(world))?;
        let local_world = local_world.clamp(1, world);
        Ok(Some(Self {
            rank,
            world,
            local_rank,
            local_world,
            host: variables.host(world, local_world)?,
            port: variables.port()?,
            limit,
            build: build.to_owned(),
            restart: variables.number("TORCHELASTIC_RESTART_COUNT", Some(0))? as u64,
            run: variables.run()?,
        }))
    }

    /// Where rank 0 listens, as `host:port`.
    pub fn address(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// The error of this rank with the reason `why`.
    pub(crate) fn error(&self, why: impl Into<String>) -> CommError {
        CommError::Rendezvous {
            rank: self.rank,
            world: self.world,
            address: self.address(),
            why: why.into(),
        }
    }
}

fn wrong(variable: &str, value: &str, why: &str) -> CommError {
    CommError::Launch {
        variable: variable.to_owned(),
        value: value.to_owned(),
        why: why.to_owned(),
    }
}

/// The first of a list of nodes such as `gpu[003-007,012],login1` or `rack[0-1]node[0-3]`.
fn first_node(list: &str) -> String {
    let mut name = String::new();
    let mut rest = list.trim();
    while let Some(at) = rest.find(['[', ',']) {
        name += &rest[..at];
        let Some(inside) = rest[at..].strip_prefix('[') else {
            return name;
        };
        name += inside.split(['-', ',', ']']).next().unwrap_or_default();
        rest = inside.split_once(']').map_or("", |(_, after)| after);
    }
    name + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(variables: &[(&str, &str)]) -> Result<Option<Launch>, CommError> {
        let get = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.into())
        };
        Launch::from_variables(get, Duration::from_secs(9), "1.2.3")
    }

    #[test]
    fn launchers_are_understood() {
        let cases: [(&[(&str, &str)], _); 7] = [
            (
                &[
                    ("RANK", "3"),
                    ("WORLD_SIZE", "4"),
                    ("LOCAL_RANK", "1"),
                    ("MASTER_ADDR", "n0"),
                    ("MASTER_PORT", "77"),
                ],
                (3, 4, 1, "n0:77"),
            ),
            (
                &[
                    ("RANK", "0"),
                    ("WORLD_SIZE", "2"),
                    ("MASTER_ADDR", "::1"),
                    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
                ],
                (0, 2, 0, "[::1]:29501"),
            ),
            (
                &[
                    ("OMPI_COMM_WORLD_RANK", "1"),
                    ("OMPI_COMM_WORLD_SIZE", "2"),
                    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
                    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
                ],
                (1, 2, 1, "127.0.0.1:29500"),
            ),
            // Hydra, whose proxies are one task of Slurm for each node.
            (
                &[
                    ("PMI_RANK", "3"),
                    ("PMI_SIZE", "4"),
                    ("MPI_LOCALRANKID", "1"),
                    ("MPI_LOCALNRANKS", "2"),
                    ("SLURM_PROCID", "1"),
                    ("SLURM_STEP_NUM_TASKS", "2"),
                    ("MASTER_ADDR", "n0"),
                ],
                (3, 4, 1, "n0:29500"),
            ),
            // srun with a PMI of its own.
            (
                &[
                    ("PMI_RANK", "3"),
                    ("PMI_SIZE", "4"),
                    ("SLURM_PROCID", "3"),
                    ("SLURM_STEP_NUM_TASKS", "4"),
                    ("SLURM_LOCALID", "1"),
                    ("MASTER_ADDR", "n0"),
                ],
                (3, 4, 1, "n0:29500"),
            ),
            (
                &[
                    ("SLURM_PROCID", "5"),
                    ("SLURM_STEP_NUM_TASKS", "8"),
                    ("SLURM_LOCALID", "1"),
                    ("SLURM_STEP_NODELIST", "gpu[003-007,012],x"),
                ],
                (5, 8, 1, "gpu003:29500"),
            ),
            (
                &[
                    ("RANK", "0"),
                    ("WORLD_SIZE", "1"),
                    ("LOWP_MASTER_PORT", "5"),
                    ("MASTER_PORT", "no"),
                ],
                (0, 1, 0, "127.0.0.1:5"),
            ),
        ];
        for (variables, expected) in cases {
            let found = launch(variables).expect("a launch").expect("a rank");
            let address = found.address();
            let found = (found.rank, found.world, found.local_rank, address.as_str());
            assert_eq!(found, expected);
        }
        assert_eq!(
            launch(&[("MASTER_ADDR", "n0"), ("SLURM_PROCID", "0")]),
            Ok(None)
        );
    }

    #[test]
    fn nodes_of_lists() {
        for (list, first) in [
            ("n1", "n1"),
            ("n1,n2", "n1"),
            ("a[7]", "a7"),
            ("a[07-09],b", "a07"),
            ("a[1,3]", "a1"),
            ("rack[0-1]_blade[02-3],x", "rack0_blade02"),
            ("a[1-2]-ib,b", "a1-ib"),
            ("a[3", "a3"),
        ] {
            assert_eq!(first_node(list), first);
        }
    }

    #[test]
    fn wrong_variables_are_named() {
        for (variables, expected) in [
            (
                vec![("RANK", "0")],
                "WORLD_SIZE: it is not set, and has to be beside RANK; set it, or start the command by a launcher",
            ),
            (
                vec![("WORLD_SIZE", "2")],
                "RANK: it must be set beside WORLD_SIZE, which is 2; set it, or unset WORLD_SIZE",
            ),
            (
                vec![("WORLD_SIZE", "abc")],
                "RANK: it must be set beside WORLD_SIZE, which is abc; set it, or unset WORLD_SIZE",
            ),
            (
                vec![("RANK", "x"), ("WORLD_SIZE", "2")],
                "RANK=x: a whole number is needed",
            ),
            (
                vec![("RANK", "2"), ("WORLD_SIZE", "2")],
                "RANK=2: WORLD_SIZE is 2; ranks count from 0",
            ),
            (
                vec![("RANK", "0"), ("WORLD_SIZE", "2")],
                "MASTER_ADDR: name the machine of rank 0, the same on every rank",
            ),
            (
                vec![
                    ("RANK", "0"),
                    ("WORLD_SIZE", "2"),
                    ("MASTER_ADDR", "a"),
                    ("MASTER_PORT", "70000"),
                ],
                "MASTER_PORT=70000: a port is 1 to 65535",
            ),
            (
                vec![
                    ("RANK", "0"),
                    ("WORLD_SIZE", "2"),
                    ("MASTER_ADDR", "a"),
                    ("MASTER_PORT", "65535"),
                    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
                ],
                "MASTER_PORT=65535: torchrun's agent has that port, and there is none after it; set LOWP_MASTER_PORT",
            ),
            (
                vec![("RANK", "0"), ("WORLD_SIZE", "18446744073709551615")],
                "WORLD_SIZE=18446744073709551615: a world has at most 1048576 ranks",
            ),
            (
                vec![("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "")],
                "MASTER_ADDR: name the machine of rank 0, the same on every rank",
            ),
            (
                vec![
                    ("RANK", "0"),
                    ("WORLD_SIZE", "2"),
                    ("MASTER_ADDR", "n0:29500"),
                ],
                "MASTER_ADDR=n0:29500: a name or an address is needed, without a port, which is MASTER_PORT",
            ),
        ] {
            let error = launch(&variables)
                .expect_err("a wrong variable")
                .to_string();
            assert_eq!(error, expected);
        }
    }
}
