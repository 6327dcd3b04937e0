//! Disk failures and power losses: a file is then in the state before a commit or after it, and never without one that
//! was acknowledged.

use futures::FutureExt as _;

use super::*;
use nodedock_model::ProblemCode;

/// A checkpoint on a test disk.
pub(super) fn start_on(disk: &Disk) -> Checkpoint {
    let disk = disk.clone();
    start_with(&disk.clone(), Box::new(move || open_on(&disk)))
}

pub(super) fn start_with(disk: &Disk, opener: writer::Opener) -> Checkpoint {
    let database = open_on(disk).unwrap();
    format::sign(&database, format::load_meta(&database).unwrap().as_ref(), &UPGRADES).unwrap();
    start(database, opener, Precious::default()).unwrap()
}

pub(super) fn open_on(disk: &Disk) -> Result<redb::Database, redb::Error> {
    Ok(Builder::new().set_cache_size(1 << 20).create_with_backend(disk.clone())?)
}

/// Records by key: for a claim the cause of its last transition, for a pod the names of its containers.
pub(super) type State = BTreeMap<(Table, Uid), String>;

fn claim_entry(claim: &ClaimRecord) -> ((Table, Uid), String) {
    ((Table::Claims, claim.id.uid.clone()), claim.timeline[0].cause.clone())
}

fn pod_entry(pod: &PodRecord) -> ((Table, Uid), String) {
    let names: Vec<_> = pod.containers.iter().map(|container| container.name.as_str()).collect();
    ((Table::Pods, pod.pod.uid.clone()), names.join(","))
}

/// Returns the records on a disk.
pub(super) fn records_on(bytes: Vec<u8>) -> State {
    let database = open_on(&Disk::with(bytes)).expect("opens after a power loss");
    let Some(contents) = format::load(&database, &[]).expect("is readable") else { return State::new() };
    assert!(contents.skipped.is_empty(), "{:?}", contents.skipped);
    contents.claims.iter().map(claim_entry).chain(contents.pods.iter().map(pod_entry)).collect()
}

pub(super) fn model(state: &mut State, changes: &[Change]) {
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
    let containers = vec![PodContainer { name: words.to_owned(), ..PodContainer::default() }];
    Change::PutPod(Arc::new(PodRecord { containers, ..pod(n) }))
}

/// Commits of puts, replacements and deletes of claims and pods, small and large.
fn scenario() -> Vec<Vec<Change>> {
    let mut commits: Vec<Vec<Change>> = Vec::new();
    for step in 0..12 {
        let size = [1, 3, 40][step % 3];
        let words = format!("step {step}");
        let mut changes: Vec<_> = (0..size).map(|n| put_claim((step * 7 + n) % 50, &words)).collect();
        changes.extend((0..size / 3).map(|n| put_pod((step * 5 + n) % 20, &words)));
        if step > 4 {
            changes.extend([Change::DeleteClaim(uid(step * 5 % 50)), Change::DeletePod(uid(step * 3 % 20))]);
        }
        commits.push(changes);
    }
    commits
}

/// Returns the states of a disk after each of the commits, beginning with the empty one.
fn states_after(commits: &[Vec<Change>]) -> Vec<State> {
    let mut states = vec![State::new()];
    for changes in commits {
        let mut state = states.last().unwrap().clone();
        model(&mut state, changes);
        states.push(state);
    }
    states
}

/// Returns possible disks after a power loss after `at` operations. A power loss is of interest after unsynced writes; three random
/// outcomes suffice.
fn images(ops: &[Op], at: usize) -> Vec<Vec<u8>> {
    let at_sync = ops.get(at).is_none_or(|op| matches!(op, Op::Sync));
    let seeds = if at_sync { 1..8 } else { 1..2 };
    let mut images = vec![cut(&ops[..at], || false)];
    images.extend(at_sync.then(|| cut(&ops[..at], || true)));
    images.extend(seeds.map(|seed| cut(&ops[..at], coin(seed * 0x9e37_79b9 + at as u64))));
    images
}

#[tokio::test]
async fn power_loss_at_any_point_leaves_the_state_before_or_after_a_commit() {
    let disk = Disk::default();
    let checkpoint = start_on(&disk);
    let born = disk.ops_count();
    let (commits, mut acknowledged) = (scenario(), vec![born]);
    // Number of operations when each commit was acknowledged.
    for changes in &commits {
        checkpoint.commit(changes.clone()).await.unwrap();
        acknowledged.push(disk.ops_count());
    }
    checkpoint.close().await;

    let (ops, states) = (disk.ops(), states_after(&commits));
    for at in born..=ops.len() {
        let durable = acknowledged.iter().rposition(|count| *count <= at).unwrap();
        for image in images(&ops, at) {
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

/// The writer commits several requests together; each of them is complete, and they are in the order of the calls.
#[tokio::test]
async fn power_loss_while_several_callers_commit_loses_nothing_that_was_acknowledged() {
    let disk = Disk::default();
    let checkpoint = start_on(&disk);
    let born = disk.ops_count();
    let commits = scenario();
    let requests = commits.iter().map(|changes| async {
        checkpoint.commit(changes.clone()).await.unwrap();
        disk.ops_count()
    });
    let mut requests = futures::future::join_all(requests);
    {
        // The first commit waits for the disk until all requests are queued.
        let _held = disk.hold();
        assert_eq!((&mut requests).now_or_never(), None);
    }
    let acknowledged = requests.await;
    let batches = checkpoint.metrics().durable.get();
    assert!(batches < commits.len() as u64, "{batches} commits");
    checkpoint.close().await;

    let (ops, states) = (disk.ops(), states_after(&commits));
    for at in born..=ops.len() {
        let durable = acknowledged.iter().filter(|count| **count <= at).count();
        for image in images(&ops, at) {
            let found = records_on(image);
            assert!(states[durable..].contains(&found), "cut at operation {at} of {}", ops.len());
        }
    }
}

#[tokio::test]
async fn a_full_disk_refuses_and_the_writer_goes_on_when_there_is_room() {
    for credit in [0, 1, 2, 3, 5, 8] {
        let disk = Disk::default();
        let checkpoint = start_on(&disk);
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
        assert!(health.degraded.is_some() && health.since_ms > 0, "{health:?}");
        assert!(checkpoint.probe().await.is_err());
        assert!(checkpoint.metrics().failed.get() > 1);

        disk.accept();
        checkpoint.probe().await.unwrap();
        assert_eq!(checkpoint.health(), Health::default());
        checkpoint.commit(vec![put(30), Change::DeleteClaim(uid(1))]).await.unwrap();
        checkpoint.close().await;
        let found = records_on(disk.bytes());
        let has = |n| found.contains_key(&(Table::Claims, uid(n)));
        assert!(has(30) && !has(1), "{found:?}");
    }
}

#[tokio::test]
async fn a_read_only_disk_is_distinguished_from_a_full_one() {
    let disk = Disk::default();
    let checkpoint = start_on(&disk);
    disk.refuse(io::ErrorKind::ReadOnlyFilesystem, 0);
    let error = checkpoint.commit(vec![put(1)]).await.unwrap_err();
    assert_eq!(error.code(), ProblemCode::CheckpointReadOnly, "{error:?}");
    assert!(nodedock_base::error::chain(&error).contains("read-only"), "{error:?}");
}

/// The first commit after a failure opens the file again; on a real file it also takes its lock again.
#[tokio::test]
async fn a_real_file_is_opened_again_by_the_same_daemon_and_not_by_another() {
    let home = Home::new();
    let opened = home.open();
    let again = file::reopener(&home.path()).unwrap();
    assert!(matches!(again(), Err(redb::Error::DatabaseAlreadyOpen)));
    opened.checkpoint.commit(vec![put(1)]).await.unwrap();
    opened.checkpoint.close().await;
    drop(again().unwrap());

    std::fs::rename(home.path(), home.path().with_extension("moved")).unwrap();
    assert!(matches!(again(), Err(redb::Error::Io(_))));
    home.open().checkpoint.close().await;
    let error = again().expect_err("another file stands there");
    assert!(error.to_string().contains("replaced"), "{error}");
}
