//! The checkpoint alone, without a daemon: durable commits against a bare log; its size on the disk and the time of a start after many commits.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use futures::future::join_all;
use nodedock_core::checkpoint::{self, Change, Checkpoint};
use nodedock_model::{ClaimRecord, ClaimState, ObjectRef, PodRecord, Uid};

use crate::Size;
use crate::accounting::{WRITTEN, accounted};
use crate::claims::AT_ONCE;
use crate::table::{Table, Times, millis};

/// Bytes of a claim's record and of a pod's.
const CLAIM_BYTES: usize = 1400;
const POD_BYTES: usize = 400;
/// Pages of the preallocated log: 16 MiB.
const LOG_PAGES: usize = 4096;
/// Claims that live while others come and go.
const LIVE_IN_CHURN: usize = 1000;
const LOG: &str = "bare log: 4 KiB, fdatasync";

pub(crate) async fn run(size: Size, table: &mut Table) {
    let directory = tempfile::Builder::new()
        .prefix("nd-bench-")
        .tempdir()
        .expect("a temporary directory");
    log(directory.path(), size, table);
    for live in [size.live[0], size.live[2]] {
        commits(
            &directory.path().join(format!("{live}.db")),
            live,
            size,
            table,
        )
        .await;
    }
    churn(&directory.path().join("churn.db"), size, table).await;
}

fn log(directory: &Path, size: Size, table: &mut Table) {
    let log = File::create(directory.join("log")).expect("a new file");
    log.write_all_at(&vec![0; LOG_PAGES * 4096], 0)
        .and_then(|()| log.sync_all())
        .expect("preallocate");
    let mut times = Times::default();
    for n in 0..size.single {
        let started = Instant::now();
        log.write_all_at(&[1; 4096], (n % LOG_PAGES * 4096) as u64)
            .expect("write a page");
        log.sync_data().expect("sync");
        times.add(started.elapsed());
    }
    table.times(LOG, &times, "", "preallocated");
}

fn uid(n: usize) -> Uid {
    // In no order, as those of objects.
    let n = (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    Uid::new(format!("{n:016x}-4000-8000-000000000000")).expect("a UID")
}

fn padding(bytes: usize) -> std::collections::BTreeMap<String, serde_json::Value> {
    [("padding".to_owned(), "x".repeat(bytes).into())].into()
}

fn put(n: usize) -> Vec<Change> {
    let id = ObjectRef::new("default", &format!("claim-{n}"), uid(n).as_str()).expect("names");
    let mut claim = ClaimRecord::new(id.clone(), ClaimState::Prepared, "boot");
    claim.unknown = padding(CLAIM_BYTES);
    let pod = PodRecord {
        pod: id,
        claims: [].into(),
        containers: Vec::new(),
        unknown: padding(POD_BYTES),
    };
    vec![
        Change::PutClaim(Arc::new(claim)),
        Change::PutPod(Arc::new(pod)),
    ]
}

fn delete(n: usize) -> Vec<Change> {
    vec![Change::DeleteClaim(uid(n)), Change::DeletePod(uid(n))]
}

async fn filled(path: &Path, live: usize) -> Checkpoint {
    let checkpoint = checkpoint::open(path)
        .expect("open the checkpoint")
        .checkpoint;
    for n in (0..live).step_by(AT_ONCE) {
        let changes = (n..live.min(n + AT_ONCE)).flat_map(put).collect();
        checkpoint
            .commit(changes)
            .await
            .expect("fill the checkpoint");
    }
    checkpoint
}

async fn commits(path: &Path, live: usize, size: Size, table: &mut Table) {
    let checkpoint = filled(path, live).await;
    let (mut puts, mut deletes, mut groups) =
        (Times::default(), Times::default(), Times::default());
    let written = written();
    for n in live..live + size.single {
        puts.time(checkpoint.commit(put(n))).await.expect("commit");
        deletes
            .time(checkpoint.commit(delete(n)))
            .await
            .expect("commit");
    }
    let bytes = self::written()
        .zip(written)
        .map(|(after, before)| after - before);
    let each = bytes.map_or(String::new(), |bytes| {
        format!("{} KiB with removal", (bytes / size.single as u64) >> 10)
    });
    let started = Instant::now();
    for _ in 0..size.single.div_ceil(AT_ONCE) {
        let requests = |change: fn(usize) -> Vec<Change>| {
            join_all((live..live + AT_ONCE).map(|n| {
                let checkpoint = checkpoint.clone();
                tokio::spawn(async move { checkpoint.commit(change(n)).await.expect("commit") })
            }))
        };
        groups.time(requests(put)).await;
        groups.time(requests(delete)).await;
    }
    let commits = 2 * size.single.div_ceil(AT_ONCE) * AT_ONCE;
    let rate = format!(
        "{:.0} commits/s",
        commits as f64 / started.elapsed().as_secs_f64()
    );
    table.times(
        &format!("checkpoint: claim and pod, {live} live"),
        &puts,
        LOG,
        &each,
    );
    table.times(
        &format!("checkpoint: their removal, {live} live"),
        &deletes,
        LOG,
        "",
    );
    table.times(
        &format!("checkpoint: 64 at once, {live} live"),
        &groups,
        LOG,
        &rate,
    );
    checkpoint.close().await;
    let mut starts = Times::default();
    for _ in 0..size.starts {
        let started = Instant::now();
        let opened = checkpoint::open(path).expect("open the checkpoint");
        starts.add(started.elapsed());
        assert_eq!(opened.dump.claims.len(), live);
        opened.checkpoint.close().await;
    }
    table.times(
        &format!("checkpoint: open with {live} claims"),
        &starts,
        "",
        "read and parsed",
    );
}

/// Claims that come and go: what the file and its log take on the disk, and the start afterwards.
async fn churn(path: &Path, size: Size, table: &mut Table) {
    let checkpoint = filled(path, LIVE_IN_CHURN).await;
    for round in 0..size.churn.div_ceil(AT_ONCE) {
        let numbers = || (0..AT_ONCE).map(move |n| LIVE_IN_CHURN + round * AT_ONCE + n);
        checkpoint
            .commit(numbers().flat_map(put).collect())
            .await
            .expect("commit");
        checkpoint
            .commit(numbers().flat_map(delete).collect())
            .await
            .expect("commit");
    }
    let on_disk =
        |path: &Path| std::fs::metadata(path).map_or(0, |metadata| metadata.blocks() * 512);
    let mebibytes =
        (on_disk(path) + on_disk(&path.with_extension("db-wal"))) as f64 / f64::from(1 << 20);
    let pairs = format!(
        "{} pairs of put and delete, {LIVE_IN_CHURN} live",
        size.churn
    );
    table.figures("checkpoint: size after", vec![mebibytes], "MiB", "", &pairs);
    // As after a crash: with its log.
    drop(checkpoint);
    let started = Instant::now();
    let opened = checkpoint::open(path).expect("open the checkpoint");
    table.figures(
        "checkpoint: open after",
        vec![millis(started.elapsed())],
        "ms",
        "",
        "not closed",
    );
    assert_eq!(opened.dump.claims.len(), LIVE_IN_CHURN);
}

/// Bytes that this process has caused to be written to disks. `None`: the kernel has no such accounting.
fn written() -> Option<u64> {
    accounted("self", WRITTEN)
}
