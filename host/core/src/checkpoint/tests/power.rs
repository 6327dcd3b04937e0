//! Disk failures and power losses: a file is then in the state before a commit or after it, and never without one that
//! was acknowledged.

use super::*;
use nodedock_model::ProblemCode;

/// An empty checkpoint on a new disk, and the disk as it was then.
pub(super) fn start() -> (Disk, Image, Checkpoint) {
    let disk = Disk::new();
    Database::create(&disk.path(), Some(VFS), format::sign_new).unwrap();
    let born = Disk::with(disk.image());
    (born.clone(), born.image(), start_on(&born))
}

/// A checkpoint on a disk that has one.
pub(super) fn start_on(disk: &Disk) -> Checkpoint {
    let mut database = open_on(disk);
    file::load(&mut database, &UPGRADES).unwrap();
    Checkpoint::new(database)
}

pub(super) fn open_on(disk: &Disk) -> Database {
    Database::open(&disk.path(), Some(VFS), None).expect("opens after a power loss")
}

/// Records by key: for a claim the cause of its last transition, for a pod the names of its containers.
pub(super) type RecordMap = BTreeMap<(Table, Uid), String>;

fn claim_entry(claim: &ClaimRecord) -> ((Table, Uid), String) {
    (
        (Table::Claims, claim.id.uid.clone()),
        claim.timeline[0].cause.clone(),
    )
}

fn pod_entry(pod: &PodRecord) -> ((Table, Uid), String) {
    let names: Vec<_> = pod
        .containers
        .iter()
        .map(|container| container.name.as_str())
        .collect();
    ((Table::Pods, pod.pod.uid.clone()), names.join(","))
}

/// Returns the records on a disk.
pub(super) fn records_on(image: Image) -> RecordMap {
    let disk = Disk::with(image);
    let mut database = open_on(&disk);
    assert_eq!(database.check().unwrap(), Ok(()));
    let contents = file::load(&mut database, &UPGRADES).expect("is readable");
    assert!(contents.skipped.is_empty(), "{:?}", contents.skipped);
    contents
        .claims
        .iter()
        .map(claim_entry)
        .chain(contents.pods.iter().map(pod_entry))
        .collect()
}

pub(super) fn model(state: &mut RecordMap, changes: &[Change]) {
    for change in changes {
        match change {
            Change::PutClaim(claim) => state.extend([claim_entry(claim)]),
            Change::PutPod(pod) => state.extend([pod_entry(pod)]),
            Change::DeleteClaim(uid) => drop(state.remove(&(Table::Claims, uid.clone()))),
            Change::DeletePod(uid) => drop(state.remove(&(Table::Pods, uid.clone()))),
            _ => unreachable!("not in a scenario"),
        }
    }
}

pub(super) fn put_claim(n: usize, words: &str) -> Change {
    Change::PutClaim(Arc::new(claim(n, words)))
}

pub(super) fn put_pod(n: usize, words: &str) -> Change {
    let containers = vec![PodContainer {
        name: words.to_owned(),
        ..PodContainer::default()
    }];
    Change::PutPod(Arc::new(PodRecord {
        containers,
        ..pod(n)
    }))
}

/// Commits of puts, replacements and deletes of claims and pods, small and large.
fn scenario() -> Vec<Vec<Change>> {
    let mut commits: Vec<Vec<Change>> = Vec::new();
    for step in 0..12 {
        let size = [1, 3, 40][step % 3];
        let words = format!("step {step}");
        let mut changes: Vec<_> = (0..size)
            .map(|n| put_claim((step * 7 + n) % 50, &words))
            .collect();
        changes.extend((0..size / 3).map(|n| put_pod((step * 5 + n) % 20, &words)));
        if step > 4 {
            changes.extend([
                Change::DeleteClaim(uid(step * 5 % 50)),
                Change::DeletePod(uid(step * 3 % 20)),
            ]);
        }
        commits.push(changes);
    }
    commits
}

/// Returns the states of a disk after each of the commits, beginning with the empty one.
fn states_after(commits: &[Vec<Change>]) -> Vec<RecordMap> {
    let mut states = vec![RecordMap::new()];
    for changes in commits {
        let mut state = states.last().unwrap().clone();
        model(&mut state, changes);
        states.push(state);
    }
    states
}

/// Returns possible disks after a power loss after `at` operations. A power loss is of interest after unsynced writes; three random
/// outcomes suffice.
fn images(born: &Image, ops: &[Op], at: usize) -> Vec<Image> {
    let at_sync = ops.get(at).is_none_or(|op| matches!(op, Op::Sync(_)));
    let seeds = if at_sync { 1..8 } else { 1..2 };
    let mut images = vec![cut(born, &ops[..at], || false)];
    images.extend(at_sync.then(|| cut(born, &ops[..at], || true)));
    images.extend(seeds.map(|seed| cut(born, &ops[..at], coin(seed * 0x9e37_79b9 + at as u64))));
    images
}

/// Commits, and copies the log into the file every few of them.
#[tokio::test]
async fn power_loss_never_splits_a_commit() {
    let (disk, born, checkpoint) = start();
    let (commits, mut acknowledged) = (scenario(), vec![0]);
    // Number of operations when each commit was acknowledged.
    for (n, changes) in commits.iter().enumerate() {
        checkpoint.commit(changes.clone()).await.unwrap();
        acknowledged.push(disk.ops_count());
        if n % 4 == 3 {
            checkpoint.writer.server().upkeep();
        }
    }
    checkpoint.close().await;

    let (ops, states) = (disk.ops(), states_after(&commits));
    let copied = ops
        .iter()
        .filter(|op| matches!(op, Op::Sync(Name::Main)))
        .count();
    assert!(
        copied >= commits.len() / 4,
        "the log was copied {copied} times"
    );
    for at in 0..=ops.len() {
        let durable = acknowledged.iter().rposition(|count| *count <= at).unwrap();
        for image in images(&born, &ops, at) {
            let found = records_on(image);
            let after = states.get(durable + 1);
            assert!(
                found == states[durable] || after == Some(&found),
                "cut at operation {at} of {}, after commit {durable}",
                ops.len()
            );
        }
    }
}

/// Several requests are committed together; each of them is complete, and they are in the order of the calls.
#[tokio::test]
async fn power_loss_preserves_concurrent_commits() {
    let (disk, born, checkpoint) = start();
    let commits = scenario();
    let mut waiting = Vec::new();
    let first = leader(&checkpoint, commits[0].clone());
    for changes in &commits[1..] {
        let mut commit = Box::pin(checkpoint.commit(changes.clone()));
        assert!(futures::poll!(&mut commit).is_pending());
        waiting.push(commit);
    }
    let mut acknowledged = Vec::new();
    first.lead().unwrap().unwrap();
    acknowledged.push(disk.ops_count());
    for commit in waiting {
        commit.await.unwrap();
        acknowledged.push(disk.ops_count());
    }
    let batches = checkpoint.metrics().durable.get();
    assert!(batches < commits.len() as u64, "{batches} commits");
    checkpoint.close().await;

    let (ops, states) = (disk.ops(), states_after(&commits));
    for at in 0..=ops.len() {
        let durable = acknowledged.iter().filter(|count| **count <= at).count();
        for image in images(&born, &ops, at) {
            let found = records_on(image);
            assert!(
                states[durable..].contains(&found),
                "cut at operation {at} of {}",
                ops.len()
            );
        }
    }
}

#[tokio::test]
async fn writer_recovers_from_full_disk() {
    for credit in [0, 1, 2, 3, 5, 8] {
        let (disk, _, checkpoint) = start();
        checkpoint.commit(vec![put(1)]).await.unwrap();
        assert_eq!(checkpoint.health(), Health::default());

        disk.refuse(io::ErrorKind::StorageFull, credit);
        // With credit the first commits may still succeed.
        let mut error = None;
        for n in 2..20 {
            error = checkpoint.commit(vec![put(n)]).await.err().or(error);
        }
        let error = error.expect("the disk is full");
        assert_eq!(error.code(), ProblemCode::CheckpointDiskFull, "{error:?}");
        let health = checkpoint.health();
        assert!(
            health.degraded.is_some() && health.since_ms > 0,
            "{health:?}"
        );
        assert!(checkpoint.probe().await.is_err());
        assert!(checkpoint.metrics().failed.get() > 1);

        disk.accept();
        checkpoint.probe().await.unwrap();
        assert_eq!(checkpoint.health(), Health::default());
        checkpoint
            .commit(vec![put(30), Change::DeleteClaim(uid(1))])
            .await
            .unwrap();
        checkpoint.close().await;
        let found = records_on(disk.image());
        let has = |n| found.contains_key(&(Table::Claims, uid(n)));
        assert!(has(30) && !has(1), "{found:?}");
    }
}

#[tokio::test]
async fn read_only_disk_is_distinguished() {
    let (disk, _, checkpoint) = start();
    disk.refuse(io::ErrorKind::ReadOnlyFilesystem, 0);
    let error = checkpoint.commit(vec![put(1)]).await.unwrap_err();
    assert_eq!(error.code(), ProblemCode::CheckpointReadOnly, "{error:?}");
    assert!(
        nodedock_base::error::chain(&error)
            .to_lowercase()
            .contains("read-only"),
        "{error:?}"
    );
}
