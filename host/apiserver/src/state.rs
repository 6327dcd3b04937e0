//! The objects and their changes: what readers see, and drafts of the next state. One lock, held for moments and never over a wait.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use futures::FutureExt;
use rpds::{RedBlackTreeMapSync, RedBlackTreeSetSync};
use serde_json::Value;
use tokio::sync::watch;

use crate::options::Options;
use crate::resources::Resource;
use crate::route::Route;
use crate::status::{self, Refusal};
use crate::storage::{self, ObjectKey, Storage, StorageError};

/// The first object of a server gets the next one.
pub(crate) const FIRST_REVISION: u64 = 100;

type Objects = RedBlackTreeMapSync<ObjectKey, Arc<Value>>;

/// One change of one object, in the version that it is stored in (`v1`; an event as core has it).
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) key: ObjectKey,
    pub(crate) revision: u64,
    /// The object after the change; of a deleted one its last state, with the resource version of the deletion.
    pub(crate) object: Arc<Value>,
    /// The object before the change.
    pub(crate) before: Option<Arc<Value>>,
    pub(crate) is_deletion: bool,
    /// Size in the history: the length of the object as JSON, and `ENTRY_BYTES` for the rest.
    cost: usize,
}

/// Size of an entry besides its object.
const ENTRY_BYTES: usize = 512;

fn cost(object: &Value) -> usize {
    struct Counter(usize);
    impl std::io::Write for Counter {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut counter = Counter(ENTRY_BYTES);
    // Neither the counter nor a value refuses anything.
    let _ = serde_json::to_writer(&mut counter, object);
    counter.0
}

/// The objects at one resource version. It is cheap to make and to keep: what did not change is shared.
#[derive(Clone, Debug)]
pub struct Snapshot {
    objects: Objects,
    /// Keys of objects by resource and UID.
    uids: RedBlackTreeMapSync<(&'static str, String), ObjectKey>,
    /// Keys of objects by the UID of each owner that they name.
    dependents: RedBlackTreeSetSync<(String, ObjectKey)>,
    pub(crate) revision: u64,
    /// Size of all objects together, by their [`cost`].
    pub(crate) bytes: usize,
}

/// Returns the key that sorts before every object of a resource.
fn first_of(plural: &'static str) -> ObjectKey {
    ObjectKey {
        resource: plural,
        namespace: String::new(),
        name: String::new(),
    }
}

impl Snapshot {
    pub(crate) fn new(revision: u64) -> Self {
        Self {
            objects: Objects::new_sync(),
            uids: RedBlackTreeMapSync::new_sync(),
            dependents: RedBlackTreeSetSync::new_sync(),
            revision,
            bytes: 0,
        }
    }

    /// The newest resource version.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Finds an object by the plural of its resource (`resourceslices`); `namespace` is empty for an object of the cluster.
    pub fn object(
        &self,
        resource: &'static Resource,
        namespace: &str,
        name: &str,
    ) -> Option<&Arc<Value>> {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        self.objects.get(&ObjectKey {
            resource: resource.plural,
            namespace,
            name,
        })
    }

    /// The objects of a resource in the order of namespace and name.
    pub fn objects(
        &self,
        resource: &'static Resource,
    ) -> impl Iterator<Item = (&ObjectKey, &Arc<Value>)> {
        self.objects
            .range(first_of(resource.plural)..)
            .take_while(move |(key, _)| key.resource == resource.plural)
    }

    /// Returns true if a namespace has an object of a resource.
    pub(crate) fn has_any(&self, resource: &'static Resource, namespace: &str) -> bool {
        let first = ObjectKey {
            namespace: namespace.to_owned(),
            ..first_of(resource.plural)
        };
        let found = self.objects.range(first..).next();
        found.is_some_and(|(key, _)| key.resource == resource.plural && key.namespace == namespace)
    }

    /// Every object, in the order of resource, namespace and name.
    pub fn all(&self) -> impl Iterator<Item = (&ObjectKey, &Arc<Value>)> {
        self.objects.iter()
    }

    /// Takes an object that was stored before.
    pub(crate) fn load(&mut self, key: ObjectKey, object: Arc<Value>) {
        let cost = cost(&object);
        self.put(key, object, cost);
    }

    fn put(&mut self, key: ObjectKey, object: Arc<Value>, cost: usize) {
        self.take(&key);
        self.bytes += cost;
        let uid = (key.resource, metadata(&object, "uid"));
        self.uids.insert_mut(uid, key.clone());
        for owner in owners(&object) {
            self.dependents.insert_mut((owner.to_owned(), key.clone()));
        }
        self.objects.insert_mut(key, object);
    }

    fn take(&mut self, key: &ObjectKey) -> Option<Arc<Value>> {
        let before = self.objects.get(key).cloned()?;
        self.objects.remove_mut(key);
        let uid = (key.resource, metadata(&before, "uid"));
        // Objects that are stored in another way may share a UID.
        if self.uids.get(&uid) == Some(key) {
            self.uids.remove_mut(&uid);
        }
        for owner in owners(&before) {
            self.dependents.remove_mut(&(owner.to_owned(), key.clone()));
        }
        self.bytes = self.bytes.saturating_sub(cost(&before));
        Some(before)
    }

    /// Returns true if there is an object of a resource with this UID.
    pub(crate) fn has_uid(&self, resource: &'static Resource, uid: &str) -> bool {
        self.uids.contains_key(&(resource.plural, uid.to_owned()))
    }

    /// The objects that name `uid` as an owner.
    pub(crate) fn dependents(&self, uid: &str) -> Vec<(ObjectKey, Arc<Value>)> {
        let first = (uid.to_owned(), first_of(""));
        let keys = self.dependents.range(first..);
        let keys = keys.take_while(|(owner, _)| owner == uid);
        keys.filter_map(|(_, key)| Some((key.clone(), self.at(key)?.clone())))
            .collect()
    }

    pub(crate) fn at(&self, key: &ObjectKey) -> Option<&Arc<Value>> {
        self.objects.get(key)
    }

    /// The object that a request names.
    pub(crate) fn current(&self, route: &Route) -> Result<Arc<Value>, Refusal> {
        let found = self.object(route.resource, &route.namespace, &route.name);
        found.cloned().ok_or_else(|| status::not_found(route))
    }
}

/// The next state while it is decided on: the objects with the changes until here.
#[derive(Debug)]
pub struct Draft {
    pub(crate) next: Snapshot,
    pub(crate) changes: Vec<Entry>,
    /// Warnings for the client, in addition to the response.
    pub(crate) warnings: Vec<String>,
    /// It is not to be committed: objects keep the resource version that they have.
    pub(crate) dry_run: bool,
}

impl Draft {
    pub(crate) fn of(snapshot: Snapshot) -> Self {
        Self {
            next: snapshot,
            changes: Vec::new(),
            warnings: Vec::new(),
            dry_run: false,
        }
    }

    /// The objects with the changes of this draft.
    pub fn snapshot(&self) -> &Snapshot {
        &self.next
    }

    /// Puts an object, new or in the place of another, with the next resource version.
    pub fn store(&mut self, resource: &'static Resource, object: Value) -> Arc<Value> {
        let key = key(resource, &object);
        let before = self.next.at(&key).cloned();
        let (object, cost) = self.log(key.clone(), object, before, false);
        self.next.put(key, Arc::clone(&object), cost);
        object
    }

    /// Removes an object, regardless of its finalizers. Returns its last state, with the resource version of the deletion.
    pub fn remove(&mut self, key: &ObjectKey) -> Option<Arc<Value>> {
        let before = self.next.take(key)?;
        Some(
            self.log(key.clone(), before.as_ref().clone(), Some(before), true)
                .0,
        )
    }

    /// Gives the object with its resource version, and its cost.
    fn log(
        &mut self,
        key: ObjectKey,
        mut object: Value,
        before: Option<Arc<Value>>,
        is_deletion: bool,
    ) -> (Arc<Value>, usize) {
        self.next.revision += 1;
        let revision = self.next.revision;
        match (self.dry_run, &before, object["metadata"].as_object_mut()) {
            (true, Some(before), Some(metadata)) => {
                metadata.insert(
                    "resourceVersion".to_owned(),
                    before["metadata"]["resourceVersion"].clone(),
                );
            }
            (true, None, Some(metadata)) => drop(metadata.remove("resourceVersion")),
            _ => object["metadata"]["resourceVersion"] = revision.to_string().into(),
        }
        let cost = cost(&object);
        let object = Arc::new(object);
        self.changes.push(Entry {
            key,
            revision,
            object: Arc::clone(&object),
            before,
            is_deletion,
            cost,
        });
        (object, cost)
    }

    /// Returns the changes for the storage: of several changes of one object the last is enough, but each revision counts.
    pub(crate) fn to_store(&self) -> Vec<storage::Change> {
        self.changes
            .iter()
            .map(|entry| storage::Change {
                key: entry.key.clone(),
                object: (!entry.is_deletion).then(|| Arc::clone(&entry.object)),
                revision: entry.revision,
            })
            .collect()
    }
}

/// UIDs of the owners that an object names.
fn owners(object: &Value) -> impl Iterator<Item = &str> {
    let references = object["metadata"]["ownerReferences"].as_array();
    let references = references.into_iter().flatten();
    references.filter_map(|reference| reference["uid"].as_str())
}

pub(crate) fn key(resource: &'static Resource, object: &Value) -> ObjectKey {
    let namespace = if resource.namespaced {
        metadata(object, "namespace")
    } else {
        String::new()
    };
    ObjectKey {
        resource: resource.plural,
        namespace,
        name: metadata(object, "name"),
    }
}

fn metadata(object: &Value, name: &str) -> String {
    object["metadata"][name]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

/// State that is published to readers and watches.
#[derive(Debug)]
pub(crate) struct WatchCache {
    pub(crate) now: Snapshot,
    pub(crate) history: VecDeque<Arc<Entry>>,
    history_bytes: usize,
    /// Last resource version from which no watch can continue.
    pub(crate) forgotten: u64,
    /// The last resource version whose change is not in the history any more.
    pub(crate) trimmed: u64,
    /// Open watches: the resource of each, by number.
    pub(crate) watches: BTreeMap<u64, &'static str>,
    pub(crate) last_watch: u64,
    /// Raised to end every watch.
    pub(crate) watch_epoch: u64,
    /// Raised to send a bookmark to every watch.
    pub(crate) bookmarks: u64,
}

/// Changes that are new to a watch. They are taken under the lock and reported without it.
#[derive(Debug)]
pub(crate) struct News {
    /// Changes of the watched resource, in the order of their versions.
    pub(crate) changes: Vec<Arc<Entry>>,
    pub(crate) revision: u64,
    /// Copy of [`WatchCache::trimmed`].
    pub(crate) trimmed: u64,
    pub(crate) watch_epoch: u64,
    pub(crate) bookmarks: u64,
}

impl WatchCache {
    /// Returns the changes of the objects of a resource after the resource version `sent`.
    pub(crate) fn since(&self, sent: u64, plural: &str) -> News {
        let first = self
            .history
            .partition_point(|change| change.revision <= sent);
        let changes = self
            .history
            .range(first..)
            .filter(|change| change.key.resource == plural);
        News {
            changes: changes.cloned().collect(),
            revision: self.now.revision,
            trimmed: self.trimmed,
            watch_epoch: self.watch_epoch,
            bookmarks: self.bookmarks,
        }
    }

    fn publish(&mut self, draft: Draft, history_bytes_max: usize) {
        self.now = draft.next;
        self.history_bytes += draft.changes.iter().map(|entry| entry.cost).sum::<usize>();
        self.history.extend(draft.changes.into_iter().map(Arc::new));
        while self.history_bytes > history_bytes_max {
            let Some(entry) = self.history.pop_front() else {
                break;
            };
            self.history_bytes -= entry.cost;
            self.trimmed = entry.revision;
            self.forgotten = self.forgotten.max(entry.revision);
        }
    }
}

/// How a commit ended. `None`: it has not.
pub(crate) type CommitEnd = watch::Receiver<Option<Result<(), Arc<StorageError>>>>;

/// A write that is decided and not durable.
#[derive(Debug)]
struct Write {
    draft: Draft,
    end: watch::Sender<Option<Result<(), Arc<StorageError>>>>,
}

/// Writes that are decided and not durable. While one commit is under way, the next one collects what is decided meanwhile, so that many writes wait
/// for a few commits.
#[derive(Debug, Default)]
struct Undurable {
    /// The objects after all decided writes. `None`: as readers have them.
    head: Option<Snapshot>,
    /// Writes of the next commit, in the order of their decisions.
    next: Vec<Write>,
    /// The end of the last write of the commit under way.
    current: Option<CommitEnd>,
    /// Number of commits that failed, and the last failure. What was decided before it is void.
    failures: u64,
    failed: Option<Arc<StorageError>>,
}

impl Undurable {
    /// Begins the next commit, unless one is under way. Returns its writes; none: there is nothing to store.
    fn begin(&mut self) -> Vec<Write> {
        if self.current.is_some() {
            return Vec::new();
        }
        self.current = self.next.last().map(|write| write.end.subscribe());
        std::mem::take(&mut self.next)
    }

    fn add(&mut self, draft: Draft) {
        self.head = Some(draft.next.clone());
        let end = watch::Sender::new(None);
        self.next.push(Write { draft, end });
    }

    /// Forgets what was decided on changes that are not stored, and returns it.
    fn fail(&mut self, error: &Arc<StorageError>) -> Vec<Write> {
        self.head = None;
        self.failures += 1;
        self.failed = Some(Arc::clone(error));
        std::mem::take(&mut self.next)
    }
}

/// A commit under way. One that is dropped before its end has failed.
struct Commit {
    store: Arc<ObjectStore>,
    writes: Vec<Write>,
    /// The storage refused several writes together: each gets a commit of its own, so that only the ones fail that cannot be stored, and those that
    /// were decided on them.
    one_by_one: bool,
}

impl Commit {
    /// Commits its writes, and those that were decided meanwhile.
    async fn run(mut self) {
        while !self.writes.is_empty() {
            self = self.once().await;
        }
    }

    /// Commits its writes, or the first of them. Returns what is left, and what was decided meanwhile.
    async fn once(mut self) -> Self {
        let number = if self.one_by_one {
            1
        } else {
            self.writes.len()
        };
        let writes = self.writes.iter().take(number);
        let changes = writes.flat_map(|write| write.draft.to_store()).collect();
        let storage = Arc::clone(&self.store.storage);
        let stored = storage.commit(changes).await;
        if stored.is_err() && number > 1 {
            self.one_by_one = true;
        } else {
            self.end(number, stored);
        }
        self
    }

    /// Shows the first writes to readers if they are stored, and then ends them. Continues with those that were decided meanwhile.
    fn end(&mut self, number: usize, stored: Result<(), StorageError>) {
        let stored = stored.map_err(Arc::new);
        let mut ends = Vec::new();
        {
            let mut undurable = self.store.undurable();
            let ended = self.writes.drain(..number.min(self.writes.len()));
            for Write { draft, end } in ended {
                if stored.is_ok() {
                    self.store.publish(draft);
                }
                ends.push(end);
            }
            if let Err(error) = &stored {
                let void = self.writes.drain(..).chain(undurable.fail(error));
                ends.extend(void.map(|write| write.end));
            }
            if self.writes.is_empty() {
                undurable.current = None;
                if undurable.next.is_empty() {
                    undurable.head = None;
                }
                self.writes = undurable.begin();
                self.one_by_one = false;
            }
        }
        // Each writer gets the error.
        if let Err(error) = &stored
            && !error.is_reported
        {
            tracing::error!(
                error = error as &dyn std::error::Error,
                writes = ends.len(),
                "cannot store objects"
            );
        }
        for end in ends {
            end.send_replace(Some(stored.clone()));
        }
    }
}

impl Drop for Commit {
    fn drop(&mut self) {
        while !self.writes.is_empty() {
            let changes = self.writes.iter().map(|write| write.draft.changes.len());
            let (changes, source) = (changes.sum(), "the commit did not end".into());
            self.end(
                self.writes.len(),
                Err(StorageError {
                    changes,
                    is_reported: false,
                    source,
                }),
            );
        }
    }
}

/// The state on which a write is decided.
pub(crate) struct Head {
    pub(crate) snapshot: Snapshot,
    failures: u64,
}

/// The state with its storage, a turn for writers, and a signal after each change.
pub(crate) struct ObjectStore {
    state: Mutex<WatchCache>,
    /// Locked before the state.
    undurable: Mutex<Undurable>,
    tick: watch::Sender<()>,
    /// True while a write is decided.
    writing: watch::Sender<bool>,
    pub(crate) storage: Arc<dyn Storage>,
    pub(crate) options: Options,
}

impl std::fmt::Debug for ObjectStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl ObjectStore {
    pub(crate) fn new(options: Options, storage: Arc<dyn Storage>, now: Snapshot) -> Self {
        let revision = now.revision;
        let state = WatchCache {
            now,
            history: VecDeque::new(),
            history_bytes: 0,
            forgotten: revision,
            trimmed: revision,
            watches: BTreeMap::new(),
            last_watch: 0,
            watch_epoch: 0,
            bookmarks: 0,
        };
        Self {
            state: Mutex::new(state),
            undurable: Mutex::default(),
            tick: watch::Sender::new(()),
            writing: watch::Sender::new(false),
            storage,
            options,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, WatchCache> {
        self.state
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut WatchCache) -> T) -> T {
        let done = change(&mut self.lock());
        self.tick.send_replace(());
        done
    }

    pub(crate) fn publish(&self, draft: Draft) {
        self.change(|state| state.publish(draft, self.options.history_bytes_max));
    }

    pub(crate) fn ticks(&self) -> watch::Receiver<()> {
        self.tick.subscribe()
    }

    fn undurable(&self) -> MutexGuard<'_, Undurable> {
        self.undurable
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns whether readers see all decided writes.
    pub(crate) fn is_published(&self) -> bool {
        self.undurable().head.is_none()
    }

    /// Returns the objects with all decided writes, those that are not durable yet among them. The caller has the turn.
    pub(crate) fn head(&self) -> Head {
        let undurable = self.undurable();
        let snapshot = undurable.head.clone();
        Head {
            snapshot: snapshot.unwrap_or_else(|| self.lock().now.clone()),
            failures: undurable.failures,
        }
    }

    /// Takes the changes of a decision, if it has any, into the next commit, and ends its turn: other writes are decided during the commit. Returns the
    /// commit after which the decision holds; `None`: it holds now.
    ///
    /// # Errors
    ///
    /// What it was decided on could not be stored.
    pub(crate) fn stage(
        self: &Arc<Self>,
        decided_on: &Head,
        draft: Option<Draft>,
        turn: Turn,
    ) -> Result<Option<CommitEnd>, Arc<StorageError>> {
        let (end, writes) = {
            let mut undurable = self.undurable();
            if let Some(error) = &undurable.failed
                && undurable.failures != decided_on.failures
            {
                return Err(Arc::clone(error));
            }
            if let Some(draft) = draft {
                undurable.add(draft);
            }
            let next = undurable.next.last().map(|next| next.end.subscribe());
            let end = next.or_else(|| undurable.current.clone());
            (end, undurable.begin())
        };
        drop(turn);
        if !writes.is_empty() {
            let commit = Commit {
                store: Arc::clone(self),
                writes,
                one_by_one: false,
            };
            // The caller's own commit may block this thread; those of writes that were decided meanwhile do not hold up its answer. A commit that began
            // is completed even if the caller goes away.
            let mut first = Box::pin(commit.once());
            match first.as_mut().now_or_never() {
                Some(rest) if rest.writes.is_empty() => {}
                Some(rest) => drop(tokio::spawn(rest.run())),
                None => drop(tokio::spawn(async move { first.await.run().await })),
            }
        }
        Ok(end)
    }

    /// Waits until no other write is decided. The first to look gets the turn, not the first to wait.
    pub(crate) async fn turn(self: &Arc<Self>) -> Turn {
        let mut writing = self.writing.subscribe();
        loop {
            if let Some(turn) = self.try_turn() {
                return turn;
            }
            // The sender is in `self`, so it is there.
            let _ = writing.wait_for(|is_writing| !is_writing).await;
        }
    }

    pub(crate) fn try_turn(self: &Arc<Self>) -> Option<Turn> {
        let is_free = self
            .writing
            .send_if_modified(|is_writing| !std::mem::replace(is_writing, true));
        is_free.then(|| Turn(Arc::clone(self)))
    }
}

/// The right to write, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn(Arc<ObjectStore>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.writing.send_replace(false);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::resources::resource;

    fn claim(name: usize, uid: usize, owners: &BTreeSet<usize>) -> Value {
        let owners: Vec<_> = owners
            .iter()
            .map(|owner| json!({ "uid": format!("u{owner}") }))
            .collect();
        json!({ "metadata": { "name": format!("c{name}"), "namespace": "default", "uid": format!("u{uid}"), "ownerReferences": owners } })
    }

    proptest! {
        /// What is found by UIDs is what a look at every object finds.
        #[test]
        fn indexes_follow_the_objects(
            steps in proptest::collection::vec((0usize..4, 0usize..4, proptest::collection::btree_set(0usize..4, 0..3), any::<bool>()), 0..24)
        ) {
            let claims = resource("resourceclaims").unwrap();
            let mut draft = Draft::of(Snapshot::new(FIRST_REVISION));
            for (name, owners_first, owners, is_removed) in steps {
                // A name that is used again has another UID.
                let object = claim(name, 4 * owners_first + name, &owners);
                match is_removed {
                    true => drop(draft.remove(&key(claims, &object))),
                    false => drop(draft.store(claims, object)),
                }
                let snapshot = draft.snapshot();
                for number in 0..16 {
                    let uid = format!("u{number}");
                    let has = snapshot.all().any(|(_, object)| object["metadata"]["uid"] == uid);
                    prop_assert_eq!(snapshot.has_uid(claims, &uid), has);
                    let of_owner = snapshot.all().filter(|(_, object)| super::owners(object).any(|owner| owner == uid));
                    let of_owner: Vec<_> = of_owner.map(|(key, object)| (key.clone(), object.clone())).collect();
                    prop_assert_eq!(snapshot.dependents(&uid), of_owner);
                }
            }
        }
    }
}
