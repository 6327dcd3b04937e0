//! Names of drivers and the sources that they belong to.
//!
//! Owns the records of names in the checkpoint. Given what sources are, what their grants say and which claims there are, it says which source may
//! serve under a name (`decide`). A source reserves its name before it is called for anything but its description, and binds it, durably, before
//! it serves. Never calls a driver.

mod decide;
mod evidence;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::RwLock;
use tokio::time::Instant;

pub use self::decide::{Evidence, Fact, NameOwner, NameRefusal, SourceFacts};
pub use self::evidence::{StoredSource, evidence};

use self::decide::{Decision, Known, Presence, decide, presence};
use super::instances::Instances;
use super::sources::{DriverView, Sources};
use crate::checkpoint::{Change, Checkpoint};
use crate::records::SharedClaimTable;
use nodedock_base::clock::now_ms;
use nodedock_base::signal::{Listener, Signal};
use nodedock_model::{
    Caller, DriverKind, DriverName, NameRecord, NameSource, Named, Problem, ProblemCode,
    SourceKind, limit,
};

/// Time for which a source waits for the files of other sources to be read. Grants are read at once; a directory that cannot be listed
/// causes no longer wait.
const NAME_WAIT: Duration = Duration::from_secs(5);

/// Store in which names are durable, and the claims that hold them.
pub struct NameStore {
    pub checkpoint: Checkpoint,
    pub claims: Arc<SharedClaimTable>,
}

/// The owner of names.
pub struct Names {
    state: RwLock<State>,
    /// Sent when a name or an endpoint becomes free, or may belong to another source.
    freed: Signal,
    /// True if every existing file has a source.
    listed: AtomicBool,
    /// Store in which names are durable. Without it they are in memory alone.
    store: OnceLock<NameStore>,
    /// Writes of names, one at a time.
    writing: tokio::sync::Mutex<()>,
    sources: Arc<Sources>,
    instances: Arc<Instances>,
}

/// Known owners and reservations of names, and facts about sources.
struct State {
    owners: BTreeMap<DriverName, Owner>,
    /// Sources that are about to serve, by name, with their keys in the registry.
    reserved: BTreeMap<DriverName, (NameSource, String)>,
    facts: BTreeMap<String, SourceFacts>,
    /// Time until which unknown native plugins may come.
    plugins_awaited: Instant,
}

struct Owner {
    owner: NameOwner,
    is_durable: bool,
}

impl Default for State {
    fn default() -> Self {
        let plugins_awaited = Instant::now() + limit::RESOURCE_GRACE;
        Self {
            owners: BTreeMap::new(),
            reserved: BTreeMap::new(),
            facts: BTreeMap::new(),
            plugins_awaited,
        }
    }
}

/// A name that a source is about to serve under. No other source is, until it is dropped.
pub struct NameReservation {
    names: Arc<Names>,
    name: DriverName,
    source: NameSource,
    key: String,
}

/// Why a name was not bound.
#[derive(Debug, Clone, thiserror::Error)]
pub enum BindError {
    #[error(transparent)]
    Refused(#[from] NameRefusal),
    #[error("it is a new name, and the checkpoint does not take its source: {0}")]
    NotStored(Problem),
}

/// Facts of other owners for a decision, read before the state of names is locked.
struct Outside {
    has_claims: bool,
    is_listed: bool,
    /// Sources of the name's instances.
    served_by: Vec<String>,
}

impl State {
    fn of(&mut self, key: &str) -> &mut SourceFacts {
        self.facts
            .entry(key.to_owned())
            .or_insert_with(|| SourceFacts {
                source: None,
                grant: Fact::Nothing,
                digest: Fact::Nothing,
                described: None,
            })
    }

    fn source(&self, key: &str) -> Option<NameSource> {
        self.facts.get(key)?.source.clone()
    }

    fn owner(&self, name: &DriverName) -> Option<&NameOwner> {
        self.owners.get(name).map(|owner| &owner.owner)
    }

    fn set_owner(&mut self, name: DriverName, owner: NameOwner, is_durable: bool) {
        self.owners.insert(name, Owner { owner, is_durable });
    }

    /// Returns whether a name belongs to another source than that of a key.
    fn is_of_another(&self, key: &str, name: &DriverName) -> bool {
        match self.owner(name) {
            Some(NameOwner::Source(owner)) => self
                .facts
                .get(key)
                .is_some_and(|facts| facts.source.as_ref() != Some(owner)),
            _ => false,
        }
    }

    /// The state in which the source of a key requests a name; without a key, in which no source does.
    fn known(&self, key: Option<&str>, name: &DriverName, outside: &Outside) -> Known<'_> {
        let is_other = |other: &str| Some(other) != key;
        let others = self.facts.iter().filter(|(other, _)| is_other(other));
        let reserved = self.reserved.get(name).filter(|(_, by)| is_other(by));
        // Of a source whose new file describes another driver, the version before still serves.
        let is_owner = |source: &String| is_other(source) && !self.is_of_another(source, name);
        Known {
            owner: self.owner(name),
            has_claims: outside.has_claims,
            others: others.map(|(_, facts)| facts).collect(),
            is_served: outside.served_by.iter().any(is_owner),
            is_listed: outside.is_listed,
            is_late: false,
            plugins_may_come: Instant::now() < self.plugins_awaited,
            reserved: reserved.map(|(source, _)| source),
        }
    }

    fn decide(&self, key: &str, name: &DriverName, outside: &Outside, is_late: bool) -> Decision {
        let Some(facts) = self.facts.get(key) else {
            return Decision::Waits;
        };
        let known = self.known(Some(key), name, outside);
        decide(name, facts, &Known { is_late, ..known })
    }
}

impl Names {
    pub(super) fn new(sources: Arc<Sources>, instances: Arc<Instances>) -> Self {
        Self {
            state: RwLock::default(),
            freed: Signal::new(),
            listed: AtomicBool::new(true),
            store: OnceLock::new(),
            writing: tokio::sync::Mutex::new(()),
            sources,
            instances,
        }
    }

    /// Loads the names of the checkpoint, once. `unreadable`: names with records that cannot be read. `evidence`: what claims say of names
    /// without a record.
    pub fn load(
        &self,
        store: NameStore,
        records: Vec<NameRecord>,
        unreadable: impl IntoIterator<Item = String>,
        evidence: BTreeMap<DriverName, Evidence>,
    ) {
        let mut state = self.state.write();
        let unreadable = unreadable
            .into_iter()
            .filter_map(|name| DriverName::new(name).ok());
        unreadable.for_each(|name| state.set_owner(name, NameOwner::Unreadable, false));
        // What claims say is better than a record that cannot be read.
        for (name, evidence) in evidence {
            state.set_owner(name, NameOwner::Evidence(evidence), false);
        }
        for record in records {
            if let Named::Driver(name) = record.name {
                state.set_owner(name, NameOwner::Source(record.source), true);
            }
        }
        drop(state);
        let is_first = self.store.set(store).is_ok();
        assert!(is_first, "the names are loaded once");
    }

    /// Says whether every file that is there has a source: not yet after a start.
    pub fn set_listed(&self, listed: bool) {
        self.listed.store(listed, Relaxed);
        self.report_freed();
    }

    pub(super) fn is_listed(&self) -> bool {
        self.listed.load(Relaxed)
    }

    /// Returns a watch that changes whenever a name or an endpoint becomes free, or may belong to another source.
    pub fn changes(&self) -> Listener {
        self.freed.subscribe()
    }

    /// Reports that a name or an endpoint may be free.
    pub(super) fn report_freed(&self) {
        self.freed.send();
    }

    /// Returns whether another source's instance of a name gives way to one of a source, since the name does not belong to the other.
    pub(super) fn gives_way(&self, other: &str, source: &str, name: &DriverName) -> bool {
        let state = self.state.read();
        !state.is_of_another(source, name) && state.is_of_another(other, name)
    }

    /// Forgets a source that is gone.
    pub(super) fn end_source(&self, key: &str, kind: DriverKind) {
        let mut state = self.state.write();
        state.facts.remove(key);
        if kind == DriverKind::Grpc {
            state.plugins_awaited = Instant::now() + limit::RESOURCE_GRACE;
        }
        drop(state);
        self.report_freed();
    }

    fn outside(&self, name: &DriverName) -> Outside {
        Outside {
            has_claims: self.has_claims(name),
            is_listed: self.is_listed(),
            served_by: self.instances.sources_of(name),
        }
    }

    fn has_claims(&self, name: &DriverName) -> bool {
        self.store
            .get()
            .is_some_and(|store| store.claims.lock().has_claims_of(name))
    }

    /// Notes what a source is, and that what its files say is to be read, if it has files.
    pub fn set_source(&self, key: &str, source: Option<NameSource>) {
        let mut state = self.state.write();
        let facts = state.of(key);
        if facts.source != source {
            *facts = SourceFacts {
                source,
                grant: Fact::Nothing,
                digest: Fact::Nothing,
                described: None,
            };
            if facts.source.as_ref().is_some_and(NameSource::is_wasm) {
                (facts.grant, facts.digest) = (Fact::Unread, Fact::Unread);
            }
        }
    }

    /// Forgets what a source is: it is the source of no driver.
    pub fn forget_source(&self, key: &str) {
        self.state.write().facts.remove(key);
    }

    /// Notes that a source's grant cannot be read: it names the driver that it named before, if it was read.
    pub fn set_grant_unreadable(&self, key: &str) {
        self.note_fact(key, |facts| {
            if facts.grant == Fact::Unread {
                facts.grant = Fact::Nothing;
            }
        });
    }

    /// Notes the driver that a source's grant names.
    pub fn set_granted_name(&self, key: &str, granted: Option<DriverName>) {
        self.note_fact(key, |facts| facts.grant = granted.into());
    }

    /// Notes the digest of a source's file; `None`: it cannot be read.
    pub fn set_read_digest(&self, key: &str, digest: Option<String>) {
        self.note_fact(key, |facts| facts.digest = digest.into());
    }

    /// Notes the name that a source describes.
    pub fn set_described(&self, key: &str, name: &DriverName) {
        self.note_fact(key, |facts| facts.described = Some(name.clone()));
    }

    fn note_fact(&self, key: &str, change: impl FnOnce(&mut SourceFacts)) {
        let mut state = self.state.write();
        let Some(facts) = state.facts.get_mut(key) else {
            return;
        };
        let before = facts.clone();
        change(facts);
        let is_changed = *facts != before;
        drop(state);
        if is_changed {
            self.report_freed();
        }
    }

    /// Returns whether a source may serve under a name now.
    pub fn may_have(&self, key: &str, name: &DriverName) -> bool {
        let outside = self.outside(name);
        let decision = self.state.read().decide(key, name, &outside, false);
        matches!(decision, Decision::Owns | Decision::Binds)
    }

    /// The source that a name belongs to, if it serves or served.
    pub fn owner_of(&self, name: &DriverName) -> Option<NameSource> {
        match self.state.read().owner(name) {
            Some(NameOwner::Source(owner)) => Some(owner.clone()),
            _ => None,
        }
    }

    /// Reserves a name for a source, before it is called for anything but its description. Waits for what the files of other sources say.
    pub async fn reserve(
        self: &Arc<Self>,
        key: &str,
        name: &DriverName,
    ) -> Result<NameReservation, NameRefusal> {
        let (mut changes, until) = (self.changes(), Instant::now() + NAME_WAIT);
        loop {
            changes.mark_unchanged();
            let is_late = Instant::now() >= until;
            match self.try_reserve(key, name, is_late) {
                Err(NameRefusal::Undecided) if !is_late => {}
                decided => return decided,
            }
            tokio::select! {
                // Safe to drop, for both: the next round sees the change.
                _ = changes.changed() => {}
                () = tokio::time::sleep_until(until) => {}
            }
        }
    }

    /// Reserves a name, or refuses it at once.
    fn try_reserve(
        self: &Arc<Self>,
        key: &str,
        name: &DriverName,
        is_late: bool,
    ) -> Result<NameReservation, NameRefusal> {
        let outside = self.outside(name);
        let mut state = self.state.write();
        let decision = state.decide(key, name, &outside, is_late);
        let source = match (decision, state.source(key)) {
            (Decision::Owns, Some(source)) => source,
            (Decision::Binds, Some(source)) => {
                state
                    .reserved
                    .insert(name.clone(), (source.clone(), key.to_owned()));
                source
            }
            (Decision::Refused(why), _) => return Err(why),
            (Decision::Waits, _) | (_, None) => return Err(NameRefusal::Undecided),
        };
        drop(state);
        Ok(NameReservation {
            names: self.clone(),
            name: name.clone(),
            source,
            key: key.to_owned(),
        })
    }

    /// Gives a name to a source until the daemon ends. `bind` makes that durable.
    pub fn hold(&self, key: &str, name: &DriverName) -> Result<(), NameRefusal> {
        let outside = self.outside(name);
        let mut state = self.state.write();
        match (state.decide(key, name, &outside, true), state.source(key)) {
            (Decision::Owns, _) => Ok(()),
            (Decision::Binds, Some(source)) => {
                state.set_owner(name.clone(), NameOwner::Source(source), false);
                Ok(())
            }
            (Decision::Refused(why), _) => Err(why),
            (Decision::Waits, _) | (_, None) => Err(NameRefusal::Undecided),
        }
    }

    /// Makes a name the source's durably. Does nothing if it is already.
    pub async fn bind(&self, key: &str, name: &DriverName) -> Result<(), BindError> {
        let _writing = self.writing.lock().await;
        let outside = self.outside(name);
        let source = {
            let state = self.state.read();
            let owner = state.owners.get(name);
            let is_durable = owner.is_some_and(|owner| owner.is_durable);
            match (state.decide(key, name, &outside, true), state.source(key)) {
                (Decision::Owns, _) if is_durable => return Ok(()),
                (Decision::Owns | Decision::Binds, Some(source)) => source,
                (Decision::Refused(why), _) => return Err(why.into()),
                (Decision::Waits, _) | (_, None) => return Err(NameRefusal::Undecided.into()),
            }
        };
        self.store_owner(name, source, None)
            .await
            .map_err(BindError::NotStored)
    }

    /// Writes the record of a name, and deletes those of names that belong to no source any more. The caller has the lock of the writes.
    async fn store_owner(
        &self,
        name: &DriverName,
        source: NameSource,
        by: Option<Caller>,
    ) -> Result<(), Problem> {
        let over = self.without_source(name);
        if let Some(store) = self.store.get() {
            let record = NameRecord::new(Named::Driver(name.clone()), source.clone(), now_ms(), by);
            let mut changes = vec![Change::PutName(Arc::new(record))];
            changes.extend(
                over.iter()
                    .map(|name| Change::DeleteName(NameRecord::key(&Named::Driver(name.clone())))),
            );
            store
                .checkpoint
                .commit(changes)
                .await
                .map_err(|error| error.problem())?;
        }
        let mut state = self.state.write();
        state.owners.retain(|name, _| !over.contains(name));
        state.set_owner(name.clone(), NameOwner::Source(source.clone()), true);
        drop(state);
        tracing::info!(driver = %name, %source, "the name of a driver belongs to a source");
        self.report_freed();
        Ok(())
    }

    /// Names whose source is gone and of which no claim is left, without `except`.
    fn without_source(&self, except: &DriverName) -> BTreeSet<DriverName> {
        let names: Vec<_> = self.state.read().owners.keys().cloned().collect();
        let others = names.into_iter().filter(|name| name != except);
        let others: Vec<_> = others.map(|name| (self.outside(&name), name)).collect();
        let state = self.state.read();
        let is_over = |(outside, name): &(Outside, DriverName)| {
            let known = state.known(None, name, outside);
            known
                .owner
                .is_some_and(|owner| presence(owner, name, &known) == Presence::Gone)
        };
        others
            .into_iter()
            .filter(is_over)
            .map(|(_, name)| name)
            .collect()
    }

    /// Gives a name to a source that describes it, by an operator's order: the source's key in the registry, or its file name without `.wasm`.
    pub async fn assign(
        &self,
        name: &DriverName,
        source: &str,
        by: Caller,
    ) -> Result<DriverView, Problem> {
        let _writing = self.writing.lock().await;
        let (key, assigned, before) = self.assignable(name, source)?;
        let cause = by.to_string();
        self.store_owner(name, assigned, Some(by)).await?;
        tracing::info!(target: "audit", driver = %name, source = key, by = cause, "driver name assigned");
        if let Some(before) = before {
            self.sources.update(before.kind, &before.source, |view| {
                view.note("name assigned to another source", &cause, 0, None);
            });
        }
        let kind = self.sources.view(&key)?.kind;
        self.sources.update(kind, &key, |view| {
            view.note("name assigned", &cause, 0, None)
        });
        self.sources.view(&key)
    }

    /// The key of a source to which a name can be assigned, the source, and the view of the source that serves under the name now.
    fn assignable(
        &self,
        name: &DriverName,
        wanted: &str,
    ) -> Result<(String, NameSource, Option<DriverView>), Problem> {
        let state = self.state.read();
        let keys = [wanted.to_owned(), format!("{wanted}.wasm")];
        let found = keys
            .into_iter()
            .find_map(|key| Some((state.facts.get(&key)?, key)));
        let Some((facts, key)) = found else {
            let message =
                format!("there is no source {wanted:?}: `nodedock get drivers` lists them");
            return Err(Problem::not_found(ProblemCode::DriverUnknown, message));
        };
        let source = facts.source.clone().filter(|_| facts.described.is_some());
        let Some((source, described)) = source.zip(facts.described.as_ref()) else {
            let message = format!(
                "{key} has not said yet which driver it is: `nodedock explain driver` says why"
            );
            return Err(Problem::unavailable(ProblemCode::DriverNotServing, message));
        };
        if described != name {
            let message = format!("{key} describes the driver {described}, and not {name}");
            return Err(Problem::invalid(ProblemCode::BadRequest, message));
        }
        if let Fact::Is(granted) = &facts.grant
            && granted != name
        {
            let message =
                format!("the grant of {key} is for the driver {granted}: change `driver` there");
            return Err(Problem::conflict(ProblemCode::DriverNameTaken, message));
        }
        let rival = |other: &&SourceFacts| {
            other.source.as_ref() != Some(&source)
                && matches!(&other.grant, Fact::Is(granted) if granted == name)
        };
        if let Some(rival) = state
            .facts
            .values()
            .find(rival)
            .and_then(|rival| rival.source.as_ref())
        {
            let message = format!(
                "the grant of {rival} names the driver {name}, which decides: remove `driver` there first"
            );
            return Err(Problem::conflict(ProblemCode::DriverNameTaken, message));
        }
        drop(state);
        let before = self.instances.source_of(name.as_str());
        let before = before.filter(|before| *before != key);
        // no error: a source that is gone by now has no view in which to note the assignment
        let before = before.and_then(|before| self.sources.view(&before).ok());
        Ok((key, source, before))
    }
}

impl NameReservation {
    pub fn source(&self) -> &NameSource {
        &self.source
    }

    /// Makes the name the source's durably, before it serves.
    pub async fn bind(&self) -> Result<(), BindError> {
        self.names.bind(&self.key, &self.name).await
    }
}

impl Drop for NameReservation {
    fn drop(&mut self) {
        let mut state = self.names.state.write();
        let reserved = &mut state.reserved;
        let is_own = reserved
            .get(&self.name)
            .is_some_and(|(_, by)| *by == self.key);
        if is_own {
            reserved.remove(&self.name);
        }
        drop(state);
        if is_own {
            self.names.report_freed();
        }
    }
}

/// Returns the problem of a source that may not serve under a name.
pub fn name_problem(name: &DriverName, source: &str, why: &NameRefusal) -> Problem {
    let order = match why {
        NameRefusal::GrantOfAnother(_) => {
            "change `driver` in its grant, or remove the file".to_owned()
        }
        NameRefusal::Undecided => "it is tried again".to_owned(),
        NameRefusal::OfPlugins => "give the driver a name of your own domain".to_owned(),
        _ => format!(
            "remove one of them, or give the name to this one: nodedock driver assign {name} {source}"
        ),
    };
    // A file and an image of one name have the same key.
    let has_key =
        |owner: &NameSource| owner.is_wasm() && source.strip_suffix(".wasm") == Some(&owner.name);
    let asking = match why {
        NameRefusal::Belongs(owner) if has_key(owner) => match owner.kind {
            SourceKind::File => NameSource::image(&owner.name).to_string(),
            _ => NameSource::file(&owner.name).to_string(),
        },
        _ => source.to_owned(),
    };
    let message = format!(
        "{asking} describes the driver {name}, and does not serve: {why}. It is not called; {order}"
    );
    Problem::conflict(ProblemCode::DriverNameTaken, message)
        .with("driver", name)
        .with("source", source)
        .with("owner", why.owner())
}
