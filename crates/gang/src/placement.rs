//! Which task runs where, and on which accelerators: a pure function over what the hosts offer.
//!
//! All tasks are placed or none. Hosts are filled in their order, and no device is given twice.

use crate::{Accelerator, Request, accelerator::gigabytes};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// Items that a message lists before it only counts them.
const SHOWN: usize = 8;

/// What one agent brings to its gang. Several agents may be on one host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The host's name.
    pub host: String,
    /// Most tasks that this agent takes.
    pub slots: u32,
    /// Devices that its tasks may use.
    pub accelerators: Vec<Accelerator>,
}

/// Where one task runs, and what it is among the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    /// Which offer it takes.
    pub offer: usize,
    /// Number among all.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
    /// Number among those on its host.
    pub local_rank: usize,
    /// How many are on its host.
    pub local_size: usize,
    /// Number of its host among those that have a task with its local rank.
    pub cross_rank: usize,
    /// How many hosts have a task with its local rank.
    pub cross_size: usize,
    /// The devices that are its own.
    pub accelerators: Vec<Accelerator>,
}

/// A place for every task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// By rank.
    pub seats: Vec<Seat>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// Places `tasks` tasks, or says why not and what to change.
///
/// Ranks follow the hosts in the order in which they first appear, then the accelerators' numbers, then the offers.
/// Where the accelerators of several offers of one host overlap, but neither contains the other, a placement may be
/// missed.
///
/// ```
/// use deuteron_gang::placement::{Offer, place};
///
/// let offer = |host: &str| Offer { host: host.into(), slots: 2, accelerators: Vec::new() };
/// let placement = place(&[offer("node1"), offer("node2")], 3, None)?;
/// let local_ranks: Vec<usize> = placement.seats.iter().map(|seat| seat.local_rank).collect();
/// assert_eq!(local_ranks, [0, 1, 0]);
/// assert_eq!(placement.seats[2].cross_rank, 1);
/// # Ok::<(), String>(())
/// ```
pub fn place(
    offers: &[Offer],
    tasks: usize,
    request: Option<&Request>,
) -> Result<Placement, String> {
    if tasks == 0 {
        return Err("a gang has at least one task, and none was asked for".into());
    }
    if let Some(request) = request
        && request.per_task == 0
    {
        return Err(format!(
            "0 × {} for each task asks for nothing: ask for one or more, or not at all",
            request.path
        ));
    }
    let mut hosts = Host::group(offers);
    let slots = hosts.iter().map(|host| host.slots(offers)).sum::<usize>();
    if slots < tasks {
        let each =
            listed(hosts.iter().map(|host| format!("{}: {}", host.name, host.slots(offers))));
        return Err(format!(
            "{} asked for, and the hosts have {} ({each}): add slots or hosts, or run fewer tasks",
            counted(tasks, "task"),
            counted(slots, "slot"),
        ));
    }
    let mut left = tasks;
    if let Some(request) = request {
        for host in &mut hosts {
            left -= host.seat_with_devices(offers, request, left);
        }
        if request.required && left > 0 {
            return Err(too_few(&hosts, offers, tasks, request));
        }
    }
    let without = left;
    let mut fell_back = Vec::new();
    for host in &mut hosts {
        let seated = host.seat_without_devices(offers, left);
        left -= seated;
        if seated > 0 {
            fell_back.push(host.name.to_owned());
        }
    }
    let mut notes = Vec::new();
    if let Some(request) = request
        && without > 0
    {
        let hosts = listed(fell_back);
        notes.push(format!(
            "{without} of {tasks} tasks found no {request} free and run without, on {hosts}"
        ));
    }
    Ok(Placement { seats: ranked(hosts, tasks), notes })
}

/// A host, its offers, and who sits there so far.
struct Host<'a> {
    name: &'a str,
    offers: Vec<usize>,
    seats: Vec<(usize, Vec<Accelerator>)>,
}

impl<'a> Host<'a> {
    /// By name, in the order of their first offer.
    fn group(offers: &'a [Offer]) -> Vec<Self> {
        let mut hosts: Vec<Self> = Vec::new();
        let mut known = HashMap::new();
        for (index, Offer { host: name, .. }) in offers.iter().enumerate() {
            let host = *known.entry(name).or_insert_with(|| {
                hosts.push(Self { name, offers: Vec::new(), seats: Vec::new() });
                hosts.len() - 1
            });
            hosts[host].offers.push(index);
        }
        hosts
    }

    fn slots(&self, offers: &[Offer]) -> usize {
        self.offers.iter().map(|&offer| offers[offer].slots as usize).sum()
    }

    /// All devices of the host, each once.
    fn devices<'b>(&self, offers: &'b [Offer]) -> Vec<&'b Accelerator> {
        let mut devices = Vec::new();
        add_new(
            &mut devices,
            &[],
            self.offers.iter().flat_map(|&offer| &offers[offer].accelerators),
        );
        devices
    }

    /// Seats up to `most` tasks that get all their devices, and says how many.
    fn seat_with_devices(&mut self, offers: &[Offer], request: &Request, most: usize) -> usize {
        let per_task = request.per_task as usize;
        let mut taken: Vec<&Accelerator> = Vec::new();
        let matching = |&offer: &usize| {
            let devices: Vec<_> = offers[offer]
                .accelerators
                .iter()
                .filter(|device| request.matches(device))
                .collect();
            (offer, devices)
        };
        let mut choices: Vec<(usize, Vec<&Accelerator>)> =
            self.offers.iter().map(matching).collect();
        // Who has the fewest to choose from is served first, so that others do not take them.
        choices.sort_by_key(|(_, devices)| devices.len());
        for (offer, mut devices) in choices {
            devices.sort_by_key(|device| device.index);
            let mut free = Vec::new();
            add_new(&mut free, &taken, devices);
            let seats = (most - self.seats.len()).min(offers[offer].slots as usize);
            for own in free.chunks_exact(per_task).take(seats) {
                taken.extend_from_slice(own);
                self.seats.push((offer, own.iter().map(|&device| device.clone()).collect()));
            }
        }
        self.seats.len()
    }

    /// Seats up to `most` tasks in the slots that are still free, and says how many.
    fn seat_without_devices(&mut self, offers: &[Offer], most: usize) -> usize {
        let before = self.seats.len();
        for &offer in &self.offers {
            let used = self.seats.iter().filter(|seat| seat.0 == offer).count();
            let free = offers[offer].slots as usize - used;
            let seats = free.min(most - (self.seats.len() - before));
            self.seats.extend((0..seats).map(|_| (offer, Vec::new())));
        }
        self.seats.len() - before
    }
}

/// Adds the devices that are neither there yet nor taken.
fn add_new<'a>(
    to: &mut Vec<&'a Accelerator>,
    taken: &[&Accelerator],
    devices: impl IntoIterator<Item = &'a Accelerator>,
) {
    for device in devices {
        if !taken.iter().chain(to.iter()).any(|known| known.is_same(device)) {
            to.push(device);
        }
    }
}

fn ranked(hosts: Vec<Host<'_>>, size: usize) -> Vec<Seat> {
    let mut seats = Vec::with_capacity(size);
    let mut hosts_with: Vec<usize> = Vec::new();
    for mut host in hosts {
        // Those without a device come last.
        let order = |(offer, devices): &(usize, Vec<Accelerator>)| {
            (devices.is_empty(), devices.first().map(|device| device.index), *offer)
        };
        host.seats.sort_by_key(order);
        let local_size = host.seats.len();
        hosts_with.resize(hosts_with.len().max(local_size), 0);
        for (local_rank, (offer, accelerators)) in host.seats.into_iter().enumerate() {
            let (rank, cross_rank) = (seats.len(), hosts_with[local_rank]);
            hosts_with[local_rank] += 1;
            seats.push(Seat {
                offer,
                rank,
                size,
                local_rank,
                local_size,
                cross_rank,
                cross_size: 0,
                accelerators,
            });
        }
    }
    for seat in &mut seats {
        seat.cross_size = hosts_with[seat.local_rank];
    }
    seats
}

fn too_few(hosts: &[Host<'_>], offers: &[Offer], tasks: usize, request: &Request) -> String {
    let room: usize = hosts.iter().map(|host| host.seats.len()).sum();
    let each = listed(hosts.iter().map(|host| {
        let all = host.devices(offers);
        let matching = all.iter().filter(|device| request.path.matches(device)).count();
        let enough = all.iter().filter(|device| request.matches(device)).count();
        let memory = if request.memory > 0 {
            format!(", {enough} with enough memory")
        } else {
            String::new()
        };
        let (name, slots) = (host.name, counted(host.slots(offers), "slot"));
        format!("{name} has {slots} and {matching} × {}{memory}{}", request.path, inventory(&all))
    }));
    let tasks = counted(tasks, "task");
    format!(
        "{tasks} asked for, each with {request}, and there is room for {room}: {each}. Run fewer tasks, add hosts, ask \
         for less, or make the request optional"
    )
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// All devices of a host in a few words.
fn inventory(devices: &[&Accelerator]) -> String {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for device in devices {
        let model = if device.model.is_empty() { "of unknown model" } else { &device.model };
        let memory = if device.memory > 0 {
            format!(", {}", gigabytes(device.memory))
        } else {
            String::new()
        };
        let name = format!("{} {model}{memory}", device.kind);
        match counts.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => counts.push((name, 1)),
        }
    }
    match counts.is_empty() {
        true => " (it found no accelerators)".into(),
        false => format!(
            " (of {})",
            listed(counts.into_iter().map(|(name, count)| format!("{count} × {name}")))
        ),
    }
}

fn listed(items: impl IntoIterator<Item = String>) -> String {
    let mut items: Vec<String> = items.into_iter().collect();
    let more = items.len().saturating_sub(SHOWN);
    items.truncate(SHOWN);
    if more > 0 {
        items.push(format!("and {more} more"));
    }
    items.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accelerator::gpu;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn request(per_task: u32, required: bool) -> Request {
        Request { path: "/gpu/h200".parse().unwrap(), per_task, memory: 60_000_000_000, required }
    }

    fn offer(host: &str, slots: u32, gpus: impl IntoIterator<Item = u32>) -> Offer {
        let accelerators = gpus.into_iter().map(|index| gpu(index, "NVIDIA H200")).collect();
        Offer { host: host.into(), slots, accelerators }
    }

    fn indexes(placement: &Placement) -> Vec<(usize, Vec<u32>)> {
        let numbers = |seat: &Seat| seat.accelerators.iter().map(|device| device.index).collect();
        placement.seats.iter().map(|seat| (seat.offer, numbers(seat))).collect()
    }

    /// Offers of up to four hosts. The agents of a host either divide its devices or all see all of them.
    fn offers() -> impl Strategy<Value = Vec<Offer>> {
        let device = (0u32..16, 0..5usize).prop_map(|(index, what)| match what {
            0 => Accelerator { kind: "fpga".into(), ..gpu(index, "NVIDIA H200") },
            1 => gpu(index, "NVIDIA H100"),
            2 => Accelerator { memory: 0, ..gpu(index, "NVIDIA H200") },
            3 => Accelerator { uuid: String::new(), ..gpu(index, "NVIDIA H200 NVL") },
            _ => gpu(index, "NVIDIA H200"),
        });
        let host = (
            prop::collection::vec(0u32..5, 1..4),
            prop::collection::vec(device, 0..12),
            any::<bool>(),
        );
        prop::collection::vec(host, 0..5).prop_flat_map(|hosts| {
            let mut offers = Vec::new();
            for (number, (slots, mut devices, divided)) in hosts.into_iter().enumerate() {
                devices.sort_by_key(|device| device.index);
                devices.dedup_by_key(|device| device.index);
                let agents = slots.len();
                for (agent, slots) in slots.into_iter().enumerate() {
                    let own = |at: &usize| !divided || at % agents == agent;
                    let accelerators =
                        (0..devices.len()).filter(own).map(|at| devices[at].clone()).collect();
                    offers.push(Offer { host: format!("node{number}"), slots, accelerators });
                }
            }
            Just(offers).prop_shuffle()
        })
    }

    /// How many tasks can have their devices at all, counted apart from the code above.
    fn capacity(offers: &[Offer], request: &Request) -> usize {
        let mut hosts: BTreeMap<&str, Vec<(usize, Vec<&Accelerator>)>> = BTreeMap::new();
        for offer in offers {
            let devices =
                offer.accelerators.iter().filter(|device| request.matches(device)).collect();
            hosts.entry(&offer.host).or_default().push((offer.slots as usize, devices));
        }
        let per_task = request.per_task as usize;
        let capacity_of = |agents: Vec<(usize, Vec<&Accelerator>)>| {
            let is_shared = agents.iter().all(|agent| agent.1 == agents[0].1);
            if is_shared {
                agents.iter().map(|agent| agent.0).sum::<usize>().min(agents[0].1.len() / per_task)
            } else {
                agents.iter().map(|agent| agent.0.min(agent.1.len() / per_task)).sum()
            }
        };
        hosts.into_values().map(capacity_of).sum()
    }

    fn check(
        offers: &[Offer],
        tasks: usize,
        request: Option<&Request>,
        placement: &Placement,
    ) -> Result<(), TestCaseError> {
        let seats = &placement.seats;
        prop_assert_eq!(seats.len(), tasks);
        let mut hosts: Vec<&str> = Vec::new();
        for offer in offers {
            if !hosts.contains(&offer.host.as_str()) {
                hosts.push(&offer.host);
            }
        }
        let host =
            |seat: &Seat| hosts.iter().position(|name| *name == offers[seat.offer].host).unwrap();
        let mut before = None;
        for (rank, seat) in seats.iter().enumerate() {
            prop_assert_eq!((seat.rank, seat.size), (rank, tasks));
            let neighbours: Vec<&Seat> =
                seats.iter().filter(|other| host(other) == host(seat)).collect();
            prop_assert_eq!(seat.local_size, neighbours.len());
            prop_assert_eq!(neighbours[seat.local_rank].rank, rank);
            let across: Vec<&Seat> =
                seats.iter().filter(|other| other.local_rank == seat.local_rank).collect();
            prop_assert_eq!(seat.cross_size, across.len());
            prop_assert_eq!(across[seat.cross_rank].rank, rank);

            let first = seat.accelerators.first().map_or(u32::MAX, |device| device.index);
            let order = Some((host(seat), first, seat.offer));
            prop_assert!(before <= order);
            before = order;

            let per_task = request.map_or(0, |request| request.per_task as usize);
            let count = seat.accelerators.len();
            prop_assert!(
                count == per_task || count == 0 && !request.is_some_and(|request| request.required)
            );
            for device in &seat.accelerators {
                prop_assert!(offers[seat.offer].accelerators.contains(device));
                prop_assert!(request.is_some_and(|request| request.matches(device)));
                let holders = neighbours.iter().flat_map(|other| &other.accelerators);
                prop_assert_eq!(holders.filter(|other| other.is_same(device)).count(), 1);
            }
        }
        for (index, offer) in offers.iter().enumerate() {
            prop_assert!(
                seats.iter().filter(|seat| seat.offer == index).count() <= offer.slots as usize
            );
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn a_placement_is_right_and_is_found_whenever_there_is_one(
            offers in offers(),
            tasks in 1usize..20,
            per_task in 1u32..4,
            kind in 0..3,
        ) {
            let slots: u32 = offers.iter().map(|offer| offer.slots).sum();
            let request = (kind > 0).then(|| request(per_task, kind == 1));
            let with_devices = request.as_ref().map_or(0, |request| capacity(&offers, request));
            let is_required = request.as_ref().is_some_and(|request| request.required);
            let possible = tasks <= slots as usize && (!is_required || tasks <= with_devices);
            let outcome = place(&offers, tasks, request.as_ref());
            prop_assert_eq!(outcome.is_ok(), possible, "{:?}", outcome);
            prop_assert_eq!(&outcome, &place(&offers, tasks, request.as_ref()));
            let Ok(placement) = outcome else { return Ok(()) };
            check(&offers, tasks, request.as_ref(), &placement)?;
            if request.is_some() {
                let served = placement.seats.iter().filter(|seat| !seat.accelerators.is_empty()).count();
                prop_assert_eq!(served, tasks.min(with_devices));
                prop_assert_eq!(placement.notes.len(), usize::from(served < tasks));
            }
        }
    }

    #[test]
    fn hosts_are_packed_in_their_order() {
        let placement = place(&[offer("b", 2, []), offer("a", 4, [])], 4, None).unwrap();
        assert_eq!(placement.seats.iter().map(|seat| seat.offer).collect::<Vec<_>>(), [0, 0, 1, 1]);
        assert_eq!(
            placement.seats.iter().map(|seat| seat.cross_rank).collect::<Vec<_>>(),
            [0, 0, 1, 1]
        );
    }

    #[test]
    fn where_accelerators_run_out_the_next_host_helps() {
        let offers = [offer("a", 8, 0..3), offer("b", 8, 0..8)];
        let placement = place(&offers, 3, Some(&request(2, true))).unwrap();
        assert_eq!(indexes(&placement), [(0, vec![0, 1]), (1, vec![0, 1]), (1, vec![2, 3])]);
    }

    #[test]
    fn agents_of_one_host_keep_their_own_devices_and_ranks_follow_those() {
        let offers = [offer("a", 1, [3]), offer("b", 1, [0]), offer("a", 1, [1])];
        let placement = place(&offers, 3, Some(&request(1, true))).unwrap();
        assert_eq!(indexes(&placement), [(2, vec![1]), (0, vec![3]), (1, vec![0])]);
        assert_eq!(placement.seats[1].local_rank, 1);
    }

    #[test]
    fn who_has_little_choice_is_served_first() {
        let offers = [offer("a", 1, [0, 1]), offer("a", 1, [0])];
        let placement = place(&offers, 2, Some(&request(1, true))).unwrap();
        assert_eq!(indexes(&placement), [(1, vec![0]), (0, vec![1])]);
    }

    #[test]
    fn optional_requests_fall_back_and_say_so() {
        let offers = [offer("a", 2, [0]), offer("b", 2, [0])];
        let placement = place(&offers, 3, Some(&request(1, false))).unwrap();
        assert_eq!(indexes(&placement), [(0, vec![0]), (0, vec![]), (1, vec![0])]);
        let note =
            "1 of 3 tasks found no 1 × /gpu/h200 with at least 60.0 GB free and run without, on a";
        assert_eq!(placement.notes, [note]);
    }

    #[test]
    fn refusals_say_what_there_is_and_what_to_change() {
        let mut offers = vec![offer("a", 2, 0..3), offer("b", 1, [])];
        offers[0].accelerators[0].memory = 40_000_000_000;
        offers[0].accelerators[1].model = "NVIDIA A100-SXM4-80GB".into();
        let error =
            |tasks, request: Option<Request>| place(&offers, tasks, request.as_ref()).unwrap_err();
        assert_eq!(
            error(2, Some(request(1, true))),
            "2 tasks asked for, each with 1 × /gpu/h200 with at least 60.0 GB, and there is room for 1: a has 2 slots and \
             2 × /gpu/h200, 1 with enough memory (of 1 × gpu NVIDIA H200, 40.0 GB; 1 × gpu NVIDIA A100-SXM4-80GB, 80.0 \
             GB; 1 × gpu NVIDIA H200, 80.0 GB); b has 1 slot and 0 × /gpu/h200, 0 with enough memory (it found no \
             accelerators). Run fewer tasks, add hosts, ask for less, or make the request optional"
        );
        let slots = "4 tasks asked for, and the hosts have 3 slots (a: 2; b: 1): add slots or hosts, or run fewer tasks";
        assert_eq!(error(4, None), slots);
        assert_eq!(error(4, Some(request(1, false))), slots);
        assert!(error(0, None).contains("at least one task"));
        assert!(error(1, Some(request(0, false))).contains("asks for nothing"));
        let many: Vec<Offer> = (0..1000).map(|host| offer(&format!("node{host}"), 1, [])).collect();
        let error = place(&many, 1001, None).unwrap_err();
        assert!(error.contains("node7: 1; and 992 more"), "{error}");
    }
}
