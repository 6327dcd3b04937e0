//! What is to be written for one pool: pure.
//!
//! Is given what the pool is to be and the slices that are there; gives the writes, in their order: what is obsolete goes first, then
//! what differs is written, then what is missing is made. Carried out to its end, or to any point and planned anew, the pool is
//! complete: each device once, every slice of one generation, each with the right count.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::assign::{Bin, assign, fit_together};
use super::content::{Content, TaintKey};
use nodedock_model::{DriverName, PoolName, Uid, limit};

/// A pool as the API knows it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolKey {
    pub driver: DriverName,
    /// Its name in the API.
    pub pool: PoolName,
}

impl std::fmt::Display for PoolKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.driver, self.pool)
    }
}

/// Where the counter sets of a pool stand.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Counters {
    /// In a slice of their own: Kubernetes 1.35 and later.
    #[default]
    Apart,
    /// In the slice of the devices that take from them: before that.
    Together,
}

/// The Node object of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    pub name: String,
    pub uid: Uid,
}

/// A slice as the server has it.
#[derive(Debug, Clone, PartialEq)]
pub struct Held {
    pub key: PoolKey,
    pub name: String,
    pub uid: String,
    pub resource_version: String,
    pub generation: i64,
    pub count: i64,
    /// Its metadata as they came, for those parts that are not ours.
    pub metadata: Value,
    pub content: Content,
    /// What was sent when the server made this of it, where that is another.
    pub sent: Option<Content>,
}

impl Held {
    /// Whether writing `content` would change nothing.
    fn has(&self, content: &Content) -> bool {
        self.content == *content || self.sent.as_ref() == Some(content)
    }

    /// Somebody wants to do something before it is deleted.
    pub(super) fn has_finalizers(&self) -> bool {
        self.metadata["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty())
    }

    /// It is being deleted, and somebody's finalizer keeps it.
    fn is_going(&self) -> bool {
        self.metadata.get("deletionTimestamp").is_some_and(|time| !time.is_null())
    }

    /// The place among the slices of its pool that its name tells, and what comes after all that tell none.
    fn order(&self) -> (u32, &str) {
        (index_of(&self.name).unwrap_or(u32::MAX), &self.name)
    }
}

/// A slice to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    pub key: PoolKey,
    pub owner: Owner,
    pub generation: i64,
    pub count: i64,
    /// Its entries as they are sent, with times of taints.
    pub devices: Vec<Value>,
    pub counters: Vec<Value>,
    /// The same without those times.
    pub content: Content,
}

/// One write.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    Delete(Box<Held>),
    Update { was: Box<Held>, draft: Draft },
    Create { generate_name: String, draft: Draft },
}

/// What is to be done, and what there is then.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Plan {
    pub(super) steps: Vec<Step>,
    pub(super) generation: i64,
    pub(super) slices: usize,
    pub(super) devices: usize,
}

/// What a plan is made of.
pub(super) struct Wish<'a> {
    pub(super) key: &'a PoolKey,
    pub(super) owner: &'a Owner,
    /// Empty: there are to be no slices.
    pub(super) content: &'a Content,
    pub(super) counters: Counters,
    /// The generation that the pool had when it was there last.
    pub(super) generation: i64,
    /// The devices of its slices when they were there last, by the place of each: what somebody deleted is made again as it was.
    pub(super) stood: &'a Stood,
    /// When taints of devices that are in no slice now were added.
    pub(super) times: &'a Times,
}

/// Which devices stand in which slice, by the slice's place.
pub(super) type Stood = BTreeMap<u32, BTreeSet<String>>;

/// Which devices of a pool stand where.
pub(super) fn stood<'a>(held: impl Iterator<Item = &'a Held>) -> Stood {
    held.filter_map(|held| Some((index_of(&held.name)?, held.content.devices.keys().cloned().collect())))
        .collect()
}

/// Why a pool cannot be told to this server.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum PlanError {
    #[error(
        "an API server before Kubernetes 1.35 takes devices with shared counters in one slice only, and the {devices} devices of \
         the pool do not fit in one"
    )]
    CountersTooWide { devices: usize },
}

/// When taints were added, by device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Times(BTreeMap<(String, TaintKey), String>);

impl Times {
    /// Learns from the slices of a pool, and forgets taints that the pool has no more.
    pub(super) fn learn<'a>(&mut self, held: impl Iterator<Item = &'a Held>, wanted: &Content) {
        let of = |name: &String, taint| (name.clone(), taint);
        for (name, device) in held.flat_map(|held| &held.content.devices) {
            let known = device.taints().filter_map(|(taint, time)| Some((of(name, taint), time?.to_owned())));
            self.0.extend(known);
        }
        let taints =
            wanted.devices.iter().flat_map(|(name, device)| device.taints().map(move |(t, _)| of(name, t)));
        let wanted: BTreeSet<_> = taints.collect();
        self.0.retain(|taint, _| wanted.contains(taint));
    }

    fn entry(&self, name: &str, entry: &super::content::Entry) -> Value {
        entry.with_times(|taint| self.0.get(&(name.to_owned(), taint.clone())).cloned())
    }
}

/// A slice to be, and the one that it was.
struct Place<'a> {
    was: Option<&'a Held>,
    content: Content,
}

/// Plans the writes for a pool, of which `held` are the slices that are there.
pub(super) fn plan<'a>(wish: &Wish<'a>, held: impl Iterator<Item = &'a Held>) -> Result<Plan, PlanError> {
    let mut held: Vec<&Held> = held.collect();
    held.sort_by(|a, b| a.order().cmp(&b.order()));
    let (going, standing): (Vec<_>, Vec<_>) = held.into_iter().partition(|held| held.is_going());
    let places = places(wish, &standing)?;
    let kept: BTreeSet<&str> = places.iter().filter_map(|place| Some(place.was?.name.as_str())).collect();
    let obsolete = standing.iter().filter(|held| !kept.contains(held.name.as_str()));
    let obsolete: Vec<&Held> = obsolete.copied().collect();
    let generation = generation(wish, &standing, &going, &places, obsolete.len());
    let count = i64::try_from(places.len()).expect("a bounded number of slices");
    let mut steps: Vec<Step> =
        obsolete.into_iter().map(|held| Step::Delete(Box::new(held.clone()))).collect();
    let draft = |content: &Content| draft(wish, content, generation, count);
    for place in &places {
        if let Some(was) = place.was.filter(|was| !is_as_wanted(was, place, generation, count, wish.owner)) {
            steps.push(Step::Update { was: Box::new(was.clone()), draft: draft(&place.content) });
        }
    }
    let mut taken: BTreeSet<u32> =
        standing.iter().chain(&going).filter_map(|held| index_of(&held.name)).collect();
    for place in places.iter().filter(|place| place.was.is_none()) {
        let index = (0..).find(|index| !taken.contains(index)).expect("there are more numbers than slices");
        taken.insert(index);
        let generate_name = prefix(index, &wish.key.driver, &wish.owner.name);
        steps.push(Step::Create { generate_name, draft: draft(&place.content) });
    }
    Ok(Plan { steps, generation, slices: places.len(), devices: wish.content.devices.len() })
}

fn places<'a>(wish: &Wish<'_>, standing: &[&'a Held]) -> Result<Vec<Place<'a>>, PlanError> {
    let Content { devices, counters } = wish.content;
    if devices.is_empty() {
        return Ok(Vec::new());
    }
    if !counters.is_empty() && wish.counters == Counters::Together {
        let bytes = counters.values().map(|set| set.bytes() + 1).sum();
        if !fit_together(devices, bytes) {
            return Err(PlanError::CountersTooWide { devices: devices.len() });
        }
        return Ok(vec![Place { was: standing.first().copied(), content: wish.content.clone() }]);
    }
    let mut rest: Vec<&Held> = standing.to_vec();
    let mut places = Vec::new();
    if !counters.is_empty() {
        let was =
            rest.iter().position(|held| !held.content.counters.is_empty()).map(|index| rest.remove(index));
        places.push(Place { was, content: Content { counters: counters.clone(), ..Content::default() } });
    }
    let mut stood: Vec<(u32, Option<&Held>, BTreeSet<String>)> = rest
        .into_iter()
        .map(|held| (held.order().0, Some(held), held.content.devices.keys().cloned().collect()))
        .collect();
    let is_gone = |index: &u32| !standing.iter().any(|held| held.order().0 == *index);
    let gone = wish.stood.iter().filter(|(index, _)| is_gone(index));
    // What stands somewhere stays there, whatever is remembered.
    let placed: BTreeSet<String> = stood.iter().flat_map(|(.., names)| names).cloned().collect();
    stood.extend(gone.map(|(index, names)| (*index, None, names.difference(&placed).cloned().collect())));
    stood.sort_by_key(|(index, ..)| *index);
    let names: Vec<_> = stood.iter().map(|(.., names)| names.clone()).collect();
    places.extend(assign(devices, &names).into_iter().map(|bin: Bin| {
        let devices = bin.devices.into_iter().map(|name| {
            let device = devices[&name].clone();
            (name, device)
        });
        let content = Content { devices: devices.collect(), ..Content::default() };
        Place { was: bin.was.and_then(|index| stood[index].1), content }
    }));
    Ok(places)
}

/// The generation for all slices of the pool.
///
/// Readers take the slices of the highest generation for the pool once as many are there as their count says. So as long as at most
/// one slice changes, the generation stays; and what is half written, where each slice of the newest generation is as it is to be, is
/// carried to its end. Anything else begins a new one.
fn generation(
    wish: &Wish<'_>,
    standing: &[&Held],
    going: &[&Held],
    places: &[Place<'_>],
    obsolete: usize,
) -> i64 {
    let newest = standing.iter().map(|held| held.generation).max();
    let now = newest.unwrap_or(wish.generation.max(1));
    let going = going.iter().map(|held| held.generation).max();
    let next = |generation: i64| generation.checked_add(1).unwrap_or(1);
    if let Some(going) = going.filter(|going| *going >= now) {
        return next(going);
    }
    let count = i64::try_from(places.len()).unwrap_or(i64::MAX);
    let is_current = |held: &Held| held.generation == now && held.count == count;
    let changed = places.iter().filter(|place| place.was.is_none_or(|was| !was.has(&place.content))).count();
    let created = places.iter().filter(|place| place.was.is_none()).count();
    let is_complete = standing.iter().all(|held| is_current(held)) && created + obsolete == 0;
    let outdated = |place: &&Place<'_>| {
        place.was.is_some_and(|was| was.generation == now && !(is_current(was) && was.has(&place.content)))
    };
    let can_go_on = !places.iter().any(|place| outdated(&place)) && (obsolete == 0 || changed == 0);
    if (is_complete && changed <= 1) || can_go_on { now } else { next(now) }
}

fn is_as_wanted(was: &Held, place: &Place<'_>, generation: i64, count: i64, owner: &Owner) -> bool {
    let counted = was.generation == generation && was.count == count;
    counted && was.has(&place.content) && super::wire::is_marked(&was.metadata, owner)
}

fn draft(wish: &Wish<'_>, content: &Content, generation: i64, count: i64) -> Draft {
    Draft {
        key: wish.key.clone(),
        owner: wish.owner.clone(),
        generation,
        count,
        devices: content.devices.iter().map(|(name, device)| wish.times.entry(name, device)).collect(),
        counters: content.counters.values().map(|set| set.json().clone()).collect(),
        content: content.clone(),
    }
}

/// The first part of a slice's name: its place among those of its pool, then for people the driver and the node.
fn prefix(index: u32, driver: &DriverName, node: &str) -> String {
    let whole = format!("{index:05x}-{driver}-{node}");
    let cut = &whole[..whole.len().min(limit::SLICE_PREFIX_BYTES_MAX - 1)];
    format!("{}-", cut.trim_end_matches(['-', '.']))
}

/// The place that a name tells. None: the name is of another making.
fn index_of(name: &str) -> Option<u32> {
    let (digits, _) = name.split_once('-')?;
    let is_one = (5..=8).contains(&digits.len())
        && digits.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    is_one.then(|| u32::from_str_radix(digits, 16).ok()).flatten().filter(|index| *index < u32::MAX)
}
