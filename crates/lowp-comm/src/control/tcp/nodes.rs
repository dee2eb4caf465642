//! Which ranks speak to rank 0 by a relay, once all are there.

use std::collections::BTreeMap;
use std::net::IpAddr;

use mio::Token;

use super::conn::{Peer, Seat};
use super::frame::Answer;
use super::server::Server;

/// The relay of each rank that has one, and its port, by the seats of ranks. A relay is the first rank of its machine; a rank has the last
/// one up to itself at its own address: also where ranks are dealt to machines one by one, or machines have one address in common.
fn relays(seats: &[(usize, Seat)]) -> BTreeMap<usize, (usize, u16)> {
    let mut firsts: BTreeMap<IpAddr, (usize, u16)> = BTreeMap::new();
    let mut nodes: BTreeMap<(usize, u16), Vec<usize>> = BTreeMap::new();
    for &(rank, seat) in seats {
        if seat.local_rank == 0 && seat.port > 0 {
            firsts.insert(seat.machine, (rank, seat.port));
        }
        if let Some(&relay) = firsts.get(&seat.machine) {
            nodes.entry(relay).or_default().push(rank);
        }
    }
    let shared = nodes.into_iter().filter(|(_, ranks)| ranks.len() > 1);
    shared
        .flat_map(|(relay, ranks)| ranks.into_iter().map(move |rank| (rank, relay)))
        .collect()
}

impl Server {
    /// Once all ranks are there, sends those of each node to its relay.
    pub(super) fn send_to_relays(&mut self) {
        if self.moving.is_some() || self.shared.joined().missing > 0 {
            return;
        }
        let seat =
            |(rank, token): (usize, &Option<Token>)| Some((rank, self.net.get((*token)?)?.seat?));
        let seats: Vec<_> = self.tokens.iter().enumerate().filter_map(seat).collect();
        let relays = relays(&seats);
        for (&rank, &(relay, port)) in &relays {
            if let Some(token) = self.tokens[rank] {
                self.tell(token, &Answer::Relay(relay, port));
            }
        }
        self.moving = Some(relays.into_keys().collect());
    }

    /// The relay `relay` has the connection of `rank`, which may close its own to rank 0 from now on, if it was sent there.
    pub(super) fn relayed(&mut self, token: Token, relay: usize, rank: usize) {
        if !self.placed(rank) {
            return;
        }
        let own = self.tokens[rank].replace(token);
        if let Some(own) = own.filter(|own| *own != token) {
            self.net.remove(own);
        }
        if let Some(conn) = self.net.get_mut(token) {
            conn.peer = Peer::Relay(relay);
        }
        self.shared.hub.relayed(rank, relay);
    }

    /// `rank` is where its calls come from; whether it was on its way.
    pub(super) fn placed(&mut self, rank: usize) -> bool {
        let moving = self.moving.as_mut();
        moving.is_some_and(|moving| moving.remove(&rank))
    }

    /// Ranks that are not there, or not with their relays.
    pub(super) fn missing(&self) -> Vec<usize> {
        match &self.moving {
            Some(moving) => moving.iter().copied().collect(),
            None => {
                let joined = self.shared.joined();
                let ranks = joined.ranks.iter().enumerate();
                ranks
                    .filter(|(_, joined)| !**joined)
                    .map(|(rank, _)| rank)
                    .collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks from 1 on, each as the last number of its address and its number on the machine.
    fn relays_of(ranks: &[(u8, usize)]) -> Vec<(usize, usize)> {
        let seat = |&(machine, local_rank): &(u8, usize)| Seat {
            machine: [10, 0, 0, machine].into(),
            local_rank,
            port: 7,
        };
        let seats: Vec<_> = (1..).zip(ranks.iter().map(seat)).collect();
        let relays = relays(&seats).into_iter();
        relays.map(|(rank, (relay, _))| (rank, relay)).collect()
    }

    #[test]
    fn ranks_speak_by_the_first_of_their_machine() {
        // Three machines of three; rank 0, which is no part of the list, has one of them.
        let blocks = [
            (1, 1),
            (1, 2),
            (2, 0),
            (2, 1),
            (2, 2),
            (3, 0),
            (3, 1),
            (3, 2),
        ];
        let expected = [(3, 3), (4, 3), (5, 3), (6, 6), (7, 6), (8, 6)];
        assert_eq!(relays_of(&blocks), expected);
        // All of one address, as rank 0 sees them.
        assert_eq!(relays_of(&blocks.map(|(_, local)| (1, local))), expected);
        // Dealt to the machines one by one.
        let dealt = [(2, 0), (1, 1), (2, 1), (1, 2), (2, 2)];
        assert_eq!(relays_of(&dealt), [(1, 1), (3, 1), (5, 1)]);
    }

    #[test]
    fn one_machine_and_ranks_alone_have_no_relay() {
        assert_eq!(relays_of(&[(1, 1), (1, 2), (1, 3)]), []);
        assert_eq!(relays_of(&[(1, 1), (2, 0), (3, 0), (4, 0)]), []);
    }
}
