//! Disks that fail and power that goes: a file is then as it was before a commit or after it, and never without one that
//! was acknowledged.

use super::*;

/// A checkpoint on a disk of ours.
fn start_on(disk: &Disk) -> Checkpoint {
    let database = open_on(disk).unwrap();
    format::sign(&database, format::load(&database).unwrap().as_ref().map(|c| &c.meta)).unwrap();
    let disk = disk.clone();
    start(database, Box::new(move || open_on(&disk)), &[]).unwrap()
}

fn open_on(disk: &Disk) -> Result<redb::Database, redb::Error> {
    Ok(Builder::new().set_cache_size(1 << 20).create_with_backend(disk.clone())?)
}

/// Which claims a disk holds, with the cause of their last transition.
fn claims_on(bytes: Vec<u8>) -> BTreeMap<Uid, String> {
    let database = open_on(&Disk::with(bytes)).expect("opens after a power loss");
    let Some(contents) = format::load(&database).expect("is readable") else { return BTreeMap::new() };
    assert!(contents.skipped.is_empty(), "{:?}", contents.skipped);
    contents.claims.into_iter().map(|claim| (claim.id.uid, claim.timeline[0].cause.clone())).collect()
}

/// Commits of puts, replacements and deletes, small and large.
fn scenario() -> Vec<Vec<Change>> {
    let put = |n: usize, cause: String| Change::PutClaim(Arc::new(claim(n, &cause)));
    let mut commits: Vec<Vec<Change>> = Vec::new();
    for step in 0..12 {
        let size = [1, 3, 40][step % 3];
        let mut changes: Vec<_> =
            (0..size).map(|n| put((step * 7 + n) % 50, format!("step {step}"))).collect();
        changes.extend((step > 4).then(|| Change::DeleteClaim(uid(step * 5 % 50))));
        commits.push(changes);
    }
    commits
}

fn model(state: &mut BTreeMap<Uid, String>, changes: &[Change]) {
    for change in changes {
        match change {
            Change::PutClaim(claim) => {
                state.insert(claim.id.uid.clone(), claim.timeline[0].cause.clone());
            }
            Change::DeleteClaim(uid) => drop(state.remove(uid)),
            _ => unreachable!("not in the scenario"),
        }
    }
}

/// A disk as it may be after a power loss: what was synced, and of the rest whatever `survives` says, by sectors of 512 bytes.
fn cut(ops: &[Op], mut survives: impl FnMut() -> bool) -> Vec<u8> {
    let synced = ops.iter().rposition(|op| matches!(op, Op::Sync)).map_or(0, |at| at + 1);
    let mut bytes = Vec::new();
    for op in &ops[..synced] {
        disk::apply(&mut bytes, op);
    }
    for op in &ops[synced..] {
        match op {
            Op::Write { offset, data } => {
                for (n, sector) in data.chunks(512).enumerate() {
                    if survives() {
                        let offset = offset + n as u64 * 512;
                        disk::apply(&mut bytes, &Op::Write { offset, data: sector.to_vec() });
                    }
                }
            }
            // The file's length is metadata: it comes with the writes or without them.
            Op::Length(_) if survives() => disk::apply(&mut bytes, op),
            _ => {}
        }
    }
    bytes
}

/// Numbers that are the same in every run (xorshift).
fn coin(mut seed: u64) -> impl FnMut() -> bool {
    move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed & 1 == 1
    }
}

#[tokio::test]
async fn power_loss_at_any_point_leaves_the_state_before_or_after_a_commit() {
    let disk = Disk::default();
    let checkpoint = start_on(&disk);
    let born = disk.ops_count();
    let mut states = vec![BTreeMap::new()];
    // How many operations had been done when each commit was acknowledged.
    let mut acknowledged = vec![born];
    for changes in scenario() {
        checkpoint.commit(changes.clone()).await.unwrap();
        acknowledged.push(disk.ops_count());
        let mut state = states.last().unwrap().clone();
        model(&mut state, &changes);
        states.push(state);
    }
    checkpoint.close().await;

    let ops = disk.ops();
    for at in born..=ops.len() {
        let durable = acknowledged.iter().rposition(|count| *count <= at).unwrap();
        // A cut is of interest where something was written since the last sync; in between three fates are enough.
        let at_sync = ops.get(at).is_none_or(|op| matches!(op, Op::Sync));
        let seeds = if at_sync { 1..8 } else { 1..2 };
        let mut images = vec![cut(&ops[..at], || false)];
        images.extend(at_sync.then(|| cut(&ops[..at], || true)));
        images.extend(seeds.map(|seed| cut(&ops[..at], coin(seed * 0x9e37_79b9 + at as u64))));
        for image in images {
            let found = claims_on(image);
            let after = states.get(durable + 1);
            assert!(
                found == states[durable] || after == Some(&found),
                "cut at operation {at} of {}, after commit {durable}",
                ops.len()
            );
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
        // With credit the first commits may still fit.
        let mut error = None;
        for n in 2..20 {
            error = checkpoint.commit(vec![put(n)]).await.err().or(error);
        }
        let error = error.expect("the disk is full");
        assert!(error.is_full() && !error.is_read_only(), "{error:?}");
        let health = checkpoint.health();
        assert!(health.degraded.is_some() && health.since_ms > 0, "{health:?}");
        assert!(checkpoint.probe().await.is_err());
        assert!(checkpoint.stats().failed_commits > 1);

        disk.accept();
        checkpoint.probe().await.unwrap();
        assert_eq!(checkpoint.health(), Health::default());
        checkpoint.commit(vec![put(30), Change::DeleteClaim(uid(1))]).await.unwrap();
        checkpoint.close().await;
        let claims = claims_on(disk.bytes());
        assert!(claims.contains_key(&uid(30)) && !claims.contains_key(&uid(1)), "{claims:?}");
    }
}

#[tokio::test]
async fn a_read_only_disk_is_told_from_a_full_one() {
    let disk = Disk::default();
    let checkpoint = start_on(&disk);
    disk.refuse(io::ErrorKind::ReadOnlyFilesystem, 0);
    let error = checkpoint.commit(vec![put(1)]).await.unwrap_err();
    assert!(error.is_read_only() && !error.is_full(), "{error:?}");
    assert!(crate::base::error::chain(&error).contains("read-only"), "{error:?}");
}

/// The first commit after a failure opens the file again; on a real file that means its lock as well.
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
