//! Which ranks are on which host, and who carries what between hosts: pure arithmetic.
//!
//! - LAYOUT-1: ranks of a host all share memory with each other, and with nobody else.
//! - LAYOUT-2: there are as many lanes as the host with the fewest ranks has ranks. The rank at place k of each host is
//!   of lane k; those beyond the last lane take part only inside their host.

use crate::mesh::algorithms::peers_of;
use std::{collections::BTreeSet, ops::Range};

/// The ranks of each host, hosts in the order of their first ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    hosts: Vec<Vec<usize>>,
}

impl Layout {
    /// If there are several hosts, one of them with several ranks, and sharing memory tells them apart.
    pub fn find(size: usize, shares: impl Fn(usize, usize) -> bool) -> Option<Self> {
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        for rank in 0..size {
            match hosts.iter_mut().find(|host| shares(host[0], rank)) {
                Some(host) => host.push(rank),
                None => hosts.push(vec![rank]),
            }
        }
        let layout = Self { hosts };
        let home: Vec<usize> = (0..size).map(|rank| layout.place(rank).0).collect();
        let regular = (0..size).all(|b| (0..b).all(|a| shares(a, b) == (home[a] == home[b])));
        let pays = layout.hosts.len() > 1 && layout.hosts.len() < size;
        Some(layout).filter(|_| regular && pays)
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.hosts.iter().map(Vec::len).sum()
    }

    /// How many hosts there are.
    pub fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// The ranks of a host.
    pub fn host(&self, host: usize) -> &[usize] {
        &self.hosts[host]
    }

    /// The host of a rank, and its place there.
    pub fn place(&self, rank: usize) -> (usize, usize) {
        let found = self.hosts.iter().enumerate().find_map(|(host, ranks)| {
            ranks.iter().position(|other| *other == rank).map(|place| (host, place))
        });
        found.unwrap_or_default()
    }

    pub fn lanes(&self) -> usize {
        self.hosts.iter().map(Vec::len).min().unwrap_or(1)
    }

    /// The ranks of a lane, one on each host.
    pub fn lane(&self, lane: usize) -> Vec<usize> {
        self.hosts.iter().filter_map(|host| host.get(lane).copied()).collect()
    }

    /// The ranks that `rank` needs a connection to: none beyond the last lane.
    pub fn peers(&self, rank: usize) -> BTreeSet<usize> {
        let (host, place) = self.place(rank);
        if place >= self.lanes() {
            return BTreeSet::new();
        }
        let lane = self.lane(place);
        peers_of(host, lane.len()).into_iter().map(|peer| lane[peer]).collect()
    }

    /// What a lane carries of each host's ranges, `ranges` being those of all ranks: equally many of each host, that of
    /// the lane's own rank first.
    pub fn carried(&self, lane: usize, ranges: &[Range<usize>]) -> Vec<Vec<Range<usize>>> {
        let most = self.hosts.iter().map(Vec::len).max().unwrap_or(1);
        let places = || (lane..most).step_by(self.lanes());
        let each = places().count().max(most.div_ceil(self.lanes()));
        let of = |host: &Vec<usize>| {
            let mut found: Vec<Range<usize>> = places()
                .map(|place| host.get(place).map_or(0..0, |rank| ranges[*rank].clone()))
                .collect();
            found.resize(each, 0..0);
            found
        };
        self.hosts.iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(hosts: &[usize]) -> Option<Layout> {
        Layout::find(hosts.len(), |a, b| hosts[a] == hosts[b])
    }

    #[test]
    fn hosts_are_found_by_what_they_share() {
        let layout = of(&[7, 3, 7, 3, 3]).unwrap();
        assert_eq!(layout.hosts, [vec![0, 2], vec![1, 3, 4]]);
        assert_eq!(layout.lanes(), 2);
        assert_eq!((layout.place(2), layout.place(4)), ((0, 1), (1, 2)));
        assert_eq!((layout.lane(0), layout.lane(1)), (vec![0, 1], vec![2, 3]));
        assert_eq!(layout.peers(2), BTreeSet::from([3]));
        assert!(layout.peers(4).is_empty());
    }

    #[test]
    fn one_host_or_one_rank_each_is_flat() {
        assert_eq!(of(&[0, 0, 0]), None);
        assert_eq!(of(&[0, 1, 2]), None);
        // Memory that only some pairs of a host share tells no hosts apart.
        assert_eq!(Layout::find(3, |a, b| a + b == 1 || a + b == 3), None);
    }

    #[test]
    fn lanes_carry_everything_once() {
        for hosts in [&[0, 0, 1, 1][..], &[0, 0, 0, 1], &[0, 1, 0, 2, 0, 1, 1, 1, 0]] {
            let layout = of(hosts).unwrap();
            let ranges: Vec<Range<usize>> = (0..hosts.len()).map(|r| 10 * r..10 * r + 7).collect();
            let carried: Vec<Vec<Vec<Range<usize>>>> =
                (0..layout.lanes()).map(|lane| layout.carried(lane, &ranges)).collect();
            for (host, ranks) in layout.hosts.iter().enumerate() {
                let lengths: BTreeSet<usize> =
                    carried.iter().map(|lane| lane[host].len()).collect();
                assert_eq!(lengths.len(), 1);
                let mut found: Vec<Range<usize>> =
                    carried.iter().flat_map(|lane| lane[host].clone()).collect();
                found.retain(|range| !range.is_empty());
                found.sort_by_key(|range| range.start);
                let expected: Vec<Range<usize>> =
                    ranks.iter().map(|rank| ranges[*rank].clone()).collect();
                assert_eq!(found, expected);
            }
        }
    }

    #[test]
    fn connections_are_mutual_and_grow_with_the_logarithm() {
        for ranks in 2..=120usize {
            for each in 2..=8 {
                let hosts: Vec<usize> = (0..ranks).map(|rank| rank / each).collect();
                let Some(layout) = of(&hosts) else { continue };
                let peers: Vec<BTreeSet<usize>> =
                    (0..ranks).map(|rank| layout.peers(rank)).collect();
                for (me, mine) in peers.iter().enumerate() {
                    assert!(mine.iter().all(|peer| *peer != me && peers[*peer].contains(&me)));
                    assert!(mine.len() <= layout.hosts().ilog2() as usize + 3);
                }
            }
        }
    }
}
