use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::PathBuf;

pub(crate) use self::disk::Disk;
use self::disk::{Image, Name, Op, VFS, coin, cut};
use super::record::Stored;
use super::*;
use nodedock_base::batches::{Entered, Leader, Serve as _};
use nodedock_model::{
    Caller, ClaimState, DeviceAccess, DeviceName, DriverName, DriverPart, ObjectRef, PodContainer,
    PoolName, PreparedClaim, PreparedDevice, ResourceDevices, Transition,
};

/// Stored files of each format, so that a later release proves that it reads them.
const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures");

mod damage;
mod disk;
mod doubt;
mod power;
mod releases;

/// A disk with an empty checkpoint.
pub(crate) fn new_disk() -> Disk {
    let (disk, _, _) = power::start();
    disk
}

/// Opens the checkpoint of a disk.
pub(crate) fn open_on(disk: &Disk) -> Opened {
    let mut database = power::open_on(disk);
    let dump = file::load(&mut database, &UPGRADES).unwrap();
    Opened {
        checkpoint: Checkpoint::new(database),
        dump,
        set_aside: None,
    }
}

fn uid(n: usize) -> Uid {
    Uid::new(format!("uid-{n:05}")).unwrap()
}

fn pod_ref(n: usize) -> ObjectRef {
    ObjectRef::new("default", &format!("pod-{n}"), uid(n).as_str()).unwrap()
}

fn claim(n: usize, cause: &str) -> ClaimRecord {
    let id = ObjectRef::new("default", &format!("claim-{n}"), uid(n).as_str()).unwrap();
    let mut record = ClaimRecord::new(id, ClaimState::Prepared, "5a8d");
    record.pods.insert(uid(n), pod_ref(n));
    record
        .drivers
        .insert(DriverName::new("gpu.example.com").unwrap(), Box::default());
    let (what, cause) = ("prepared".to_owned(), cause.to_owned());
    record.note(Transition {
        at_ms: 1,
        what,
        cause,
        duration_us: 2,
        ..Transition::default()
    });
    record
}

fn pod(n: usize) -> PodRecord {
    PodRecord {
        pod: pod_ref(n),
        claims: [("gpu".to_owned(), claim(n, "").id)].into(),
        containers: Vec::new(),
        unknown: BTreeMap::new(),
    }
}

/// A request that has begun to commit, so that others wait for it.
fn leader(checkpoint: &Checkpoint, changes: Vec<Change>) -> Leader<Writer> {
    match checkpoint
        .writer
        .enter(Work::Commit(encoded(changes).unwrap()))
    {
        Entered::First(leader) => leader,
        Entered::Waiting(_) => panic!("another request commits"),
    }
}

fn put(n: usize) -> Change {
    Change::PutClaim(Arc::new(claim(n, "test")))
}

struct Home {
    directory: tempfile::TempDir,
}

impl Home {
    fn new() -> Self {
        Self {
            directory: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("lib/nodedock/checkpoint.db")
    }

    fn open(&self) -> Opened {
        open(&self.path()).unwrap()
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path().parent().unwrap()).unwrap();
        let mut names: Vec<_> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

/// The raw file, as another program opens it while no daemon runs.
fn raw(home: &Home) -> rusqlite::Connection {
    rusqlite::Connection::open(home.path()).unwrap()
}

/// Sets a record, as another release would.
fn write_raw(home: &Home, table: Table, key: &str, version: i64, record: &str) {
    let (database, kind) = (raw(home), table.as_str());
    let checksum = Stored {
        version,
        record: record.as_bytes(),
    }
    .checksum(kind, key);
    database
        .execute(
            "DELETE FROM records WHERE kind = ?1 AND key = ?2",
            [kind, key],
        )
        .unwrap();
    let insert =
        "INSERT INTO records (kind, key, version, checksum, record) VALUES (?1, ?2, ?3, ?4, ?5)";
    database
        .execute(
            insert,
            rusqlite::params![kind, key, version, checksum, record],
        )
        .unwrap();
}

fn sign(database: &rusqlite::Connection, format: u32, written_by: &str) {
    let update = "UPDATE meta SET value = ?2 WHERE key = ?1";
    database
        .execute(update, ["format", &format.to_string()])
        .unwrap();
    database
        .execute(update, ["written-by", written_by])
        .unwrap();
}

/// A claim with devices and shares of one driver, and without a result of another.
fn prepared_claim(n: usize) -> ClaimRecord {
    let device = |name: &str, share: Option<&str>| PreparedDevice {
        requests: vec!["gpu".to_owned()],
        pool: PoolName::new("pool").unwrap(),
        device: DeviceName::new(name).unwrap(),
        share_id: share.map(str::to_owned),
        access: DeviceAccess::CdiDevices(vec![format!("v/c={name}")]),
        status: None,
        attributes: None,
    };
    let devices = vec![
        device("a", None),
        device("b", Some("s-1")),
        device("b", Some("s-2")),
    ];
    let prepared = PreparedClaim {
        devices,
        memo: b"memo".to_vec(),
        ..PreparedClaim::default()
    };
    let mut record = claim(n, "test");
    for (name, prepared) in [
        ("gpu.example.com", Some(prepared)),
        ("nic.example.com", None),
    ] {
        let part = DriverPart {
            prepared: prepared.map(Arc::new),
            ..DriverPart::default()
        };
        record
            .drivers
            .insert(DriverName::new(name).unwrap(), Box::new(part));
    }
    record
}

#[tokio::test]
async fn records_survive_close_and_open() {
    let home = Home::new();
    let opened = home.open();
    assert!(
        opened.dump.claims.is_empty() && opened.dump.pods.is_empty() && opened.set_aside.is_none()
    );
    let prepared = Change::PutClaim(Arc::new(prepared_claim(2)));
    let changes = vec![
        put(2),
        put(1),
        prepared,
        put(3),
        Change::PutPod(Arc::new(pod(1))),
        Change::PutPod(Arc::new(pod(2))),
    ];
    opened.checkpoint.commit(changes).await.unwrap();
    opened
        .checkpoint
        .commit(vec![Change::DeleteClaim(uid(3)), Change::DeletePod(uid(2))])
        .await
        .unwrap();
    opened.checkpoint.close().await;

    let opened = home.open();
    assert_eq!(
        opened.dump.claims,
        [claim(1, "test"), prepared_claim(2)],
        "of two puts the later one"
    );
    assert_eq!(opened.dump.pods, [pod(1)]);
    assert!(opened.dump.skipped.is_empty() && opened.set_aside.is_none());
}

fn ended(n: usize) -> EndedRecord {
    let claim = claim(n, "test");
    EndedRecord {
        id: claim.id,
        at_ms: 7,
        pods: claim.pods,
        devices: BTreeMap::new(),
        timeline: claim.timeline,
        unknown: BTreeMap::new(),
    }
}

/// Rows of a kind, with their keys.
fn rows_of(home: &Home, kind: &str) -> Vec<(i64, String)> {
    let database = raw(home);
    let mut query = database
        .prepare("SELECT id, key FROM records WHERE kind = ?1 ORDER BY id")
        .unwrap();
    let rows = query.query_map([kind], |row| Ok((row.get(0)?, row.get(1)?)));
    rows.unwrap().map(Result::unwrap).collect()
}

#[tokio::test]
async fn ended_record_takes_its_claims_row() {
    let home = Home::new();
    let checkpoint = home.open().checkpoint;
    let changes = vec![put(1), put(2), Change::PutPod(Arc::new(pod(1))), put(3)];
    checkpoint.commit(changes).await.unwrap();
    checkpoint.close().await;
    let before = rows_of(&home, "claims");

    let checkpoint = home.open().checkpoint;
    let changes = vec![
        Change::DeleteClaim(uid(1)),
        Change::PutEnded(Arc::new(ended(1))),
        Change::DeletePod(uid(1)),
        Change::DeleteClaim(uid(2)),
        // Another key, which has no place here.
        Change::PutEnded(Arc::new(ended(4))),
    ];
    checkpoint.commit(changes).await.unwrap();
    // The row is the new record's: a claim of the same key gets its own.
    checkpoint.commit(vec![put(1)]).await.unwrap();
    let deleted = vec![Change::DeleteEnded(uid(4))];
    checkpoint.commit(deleted).await.unwrap();
    checkpoint.close().await;

    let opened = home.open();
    let dump = &opened.dump;
    assert_eq!(dump.claims, [claim(1, "test"), claim(3, "test")]);
    assert_eq!(dump.ended, [ended(1)]);
    assert!(dump.pods.is_empty() && dump.skipped.is_empty());
    opened.checkpoint.close().await;
    assert_eq!(rows_of(&home, "ended"), [before[0].clone()]);
    assert_eq!(rows_of(&home, "claims")[0], before[2]);
}

/// A record that was deleted and written again in one commit is one record, as after two commits.
#[tokio::test]
async fn deleted_record_is_written_again_once() {
    let home = Home::new();
    let checkpoint = home.open().checkpoint;
    checkpoint.commit(vec![put(1), put(2)]).await.unwrap();
    let changes = vec![
        Change::DeleteClaim(uid(1)),
        Change::DeleteClaim(uid(1)),
        Change::PutClaim(Arc::new(claim(1, "again"))),
        Change::DeleteClaim(uid(2)),
        Change::PutClaim(Arc::new(claim(2, "again"))),
        Change::DeleteClaim(uid(2)),
    ];
    checkpoint.commit(changes).await.unwrap();
    checkpoint.close().await;
    let opened = home.open();
    assert_eq!(opened.dump.claims, [claim(1, "again")]);
    assert!(opened.dump.skipped.is_empty());
}

#[tokio::test]
async fn only_changed_records_are_written() {
    let home = Home::new();
    let checkpoint = home.open().checkpoint;
    let offer = |name: &str, registered| {
        let driver = DriverName::new(name).unwrap();
        let offer = DriverOffer {
            driver: driver.clone(),
            starts: Default::default(),
            registered,
        };
        (driver, offer)
    };
    let mut stored = StoredRecords::new(checkpoint.clone(), BTreeMap::new());
    for now in [
        BTreeMap::from([offer("a", false), offer("b", false)]),
        BTreeMap::from([offer("a", false), offer("b", true)]),
        BTreeMap::from([offer("a", false), offer("b", true)]),
        BTreeMap::from([offer("b", true)]),
    ] {
        stored.save(&now).await.unwrap();
        let read: Vec<_> = read(&home.path()).unwrap().driver_offers;
        assert_eq!(read, now.values().cloned().collect::<Vec<_>>());
    }
    let metrics = checkpoint.metrics();
    assert_eq!((metrics.changes.sum(), metrics.durable.get()), (4.0, 3));
    checkpoint.close().await;
    assert!(stored.save(&BTreeMap::new()).await.is_err());
    assert_eq!(stored.records().len(), 1, "what is durable is known");
}

/// The caller of an RPC went away during the commit, which was durable all the same.
#[tokio::test]
async fn cancelled_save_is_repeated() {
    let home = Home::new();
    let checkpoint = home.open().checkpoint;
    let name = DriverName::new("a").unwrap();
    let offer = |registered| {
        let offer = DriverOffer {
            driver: name.clone(),
            starts: Default::default(),
            registered,
        };
        BTreeMap::from([(name.clone(), offer)])
    };
    let mut stored = StoredRecords::new(checkpoint.clone(), BTreeMap::new());
    stored.save(&offer(false)).await.unwrap();
    for (dropped, then) in [(offer(true), offer(false)), (offer(true), BTreeMap::new())] {
        let first = leader(&checkpoint, vec![put(1)]);
        {
            let mut save = Box::pin(stored.save(&dropped));
            assert!(futures::poll!(&mut save).is_pending());
        }
        first.lead().unwrap().unwrap();
        assert!(checkpoint.answers().await && !stored.has(&offer(false)));
        assert!(read(&home.path()).unwrap().driver_offers[0].registered);
        stored.save(&then).await.unwrap();
        let read = read(&home.path()).unwrap().driver_offers;
        assert_eq!(read, then.into_values().collect::<Vec<_>>());
    }
}

/// Records of a megabyte each.
#[tokio::test]
async fn log_is_copied_after_large_records() {
    let home = Home::new();
    let checkpoint = home.open().checkpoint;
    for round in 0..40 {
        let mut large = claim(1, "test");
        let text = round.to_string().repeat(1 << 19);
        large.unknown.insert("large".to_owned(), text.into());
        let change = Change::PutClaim(Arc::new(large));
        checkpoint.commit(vec![change]).await.unwrap();
        assert!(checkpoint.answers().await);
    }
    let log = std::fs::metadata(file::log_of(&home.path())).unwrap().len();
    assert!(log < 8_000_000, "{log} bytes");
}

#[tokio::test]
async fn file_is_readable_by_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let home = Home::new();
    let opened = home.open();
    opened.checkpoint.commit(vec![put(1)]).await.unwrap();
    assert_eq!(home.names(), ["checkpoint.db", "checkpoint.db-wal"]);
    for name in home.names() {
        let metadata = std::fs::metadata(home.path().with_file_name(name)).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    }
}

#[tokio::test]
async fn deleting_absent_records_succeeds() {
    let home = Home::new();
    let checkpoint = home.open().checkpoint;
    checkpoint
        .commit(vec![Change::DeleteClaim(uid(9)), Change::DeletePod(uid(9))])
        .await
        .unwrap();
    checkpoint.commit(Vec::new()).await.unwrap();
    assert_eq!(checkpoint.metrics().durable.get(), 1);
}

#[tokio::test]
async fn requests_that_wait_share_a_commit() {
    let home = Home::new();
    let checkpoint = home.open().checkpoint;
    let first = leader(&checkpoint, vec![put(0)]);
    let mut waiting: Vec<_> = (1..64)
        .map(|n| Box::pin(checkpoint.commit(vec![put(n)])))
        .collect();
    for commit in &mut waiting {
        assert!(futures::poll!(commit).is_pending());
    }
    first.lead().unwrap().unwrap();
    for commit in waiting {
        commit.await.unwrap();
    }
    let metrics = checkpoint.metrics();
    assert_eq!((metrics.changes.sum(), metrics.durable.get()), (64.0, 1));
    assert!(metrics.value_bytes.get() > 64 * 100, "{metrics:?}");
}

#[tokio::test]
async fn second_open_is_refused_with_path() {
    let home = Home::new();
    let first = home.open();
    let error = open(&home.path()).err().unwrap();
    assert!(matches!(error, OpenError::InUse(_)), "{error}");
    assert!(
        error.to_string().contains(home.path().to_str().unwrap()),
        "{error}"
    );
    first.checkpoint.close().await;
    home.open();
}

#[tokio::test]
async fn closed_checkpoint_refuses_commits() {
    let home = Home::new();
    let checkpoint = home.open().checkpoint;
    let other = checkpoint.clone();
    checkpoint.close().await;
    checkpoint.close().await;
    assert!(matches!(
        other.commit(vec![put(1)]).await,
        Err(CommitError::Closed)
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn commit_during_close_is_refused() {
    let home = Home::new();
    let checkpoint = home.open().checkpoint;
    let close = || {
        let end = || tokio::runtime::Handle::current().block_on(checkpoint.close());
        tokio::task::block_in_place(end);
        ((), vec![put(1)])
    };
    let commit = checkpoint.commit_in_order(Vec::new(), close);
    let outcome = tokio::time::timeout(std::time::Duration::from_secs(20), commit).await;
    assert!(
        matches!(outcome, Ok(Err(CommitError::Closed))),
        "{outcome:?}"
    );
}

#[tokio::test]
async fn commit_queued_behind_close_is_refused() {
    let home = Home::new();
    let checkpoint = home.open().checkpoint;
    let first = leader(&checkpoint, vec![put(1)]);
    let mut close = Box::pin(checkpoint.close());
    let mut late = Box::pin(checkpoint.commit(vec![put(2)]));
    assert!(futures::poll!(&mut close).is_pending() && futures::poll!(&mut late).is_pending());
    first.lead().unwrap().unwrap();
    close.await;
    assert!(matches!(late.await, Err(CommitError::Closed)));
    assert!(!checkpoint.answers().await);
    assert_eq!(home.open().dump.claims.len(), 1);
}

#[tokio::test]
async fn commit_of_cancelled_caller_is_durable() {
    let home = Home::new();
    let checkpoint = home.open().checkpoint;
    let first = leader(&checkpoint, vec![put(1)]);
    {
        let mut joined = Box::pin(checkpoint.commit(vec![put(2)]));
        assert!(futures::poll!(&mut joined).is_pending());
    }
    drop(first);
    checkpoint.close().await;
    assert_eq!(home.open().dump.claims.len(), 2);
}

#[tokio::test]
async fn log_length_stays_bounded() {
    let home = Home::new();
    let checkpoint = home.open().checkpoint;
    let log = file::log_of(&home.path());
    let mut longest = 0;
    for round in 0..40 {
        checkpoint
            .commit(
                (0..200)
                    .map(|n| Change::PutClaim(Arc::new(claim(n, &round.to_string()))))
                    .collect(),
            )
            .await
            .unwrap();
        assert!(checkpoint.answers().await);
        longest = longest.max(std::fs::metadata(&log).unwrap().len());
    }
    assert!((4_000_000..8_000_000).contains(&longest), "{longest} bytes");
    let copied = std::fs::metadata(home.path()).unwrap().len();
    assert!(copied > 40 << 10, "{copied} bytes are in the file");
    checkpoint.close().await;
    assert!(!file::is_log_filled(&log));
    assert_eq!(home.open().dump.claims.len(), 200);
}

/// Writes the fixture of this format, under its name.
#[tokio::test]
#[ignore = "writes the fixture"]
async fn write_the_fixture() {
    let home = Home::new();
    let checkpoint = home.open().checkpoint;
    let mut first = claim(1, "NodePrepareResources");
    first.id = ObjectRef::new("ml", "train-gpu", uid(1).as_str()).unwrap();
    first
        .unknown
        .insert("lease".to_owned(), serde_json::json!({"until": 7}));
    let changes = vec![
        Change::PutClaim(Arc::new(first)),
        put(2),
        Change::PutPod(Arc::new(pod(1))),
    ];
    checkpoint.commit(changes).await.unwrap();
    checkpoint.close().await;
    std::fs::copy(
        home.path(),
        format!("{FIXTURES}/checkpoint-v{FORMAT_VERSION}.db"),
    )
    .unwrap();
}

#[tokio::test]
async fn reading_an_open_file_changes_nothing() {
    let home = Home::new();
    let checkpoint = home.open().checkpoint;
    checkpoint
        .commit(vec![put(1), Change::PutPod(Arc::new(pod(1))), put(2)])
        .await
        .unwrap();
    let before = std::fs::read(home.path()).unwrap();
    let dump = read(&home.path()).unwrap();
    assert_eq!(
        (dump.claims.len(), dump.pods.len(), dump.meta.format),
        (2, 1, FORMAT_VERSION)
    );
    let report = verify(&home.path()).unwrap();
    assert_eq!(report.integrity, Integrity::NotClosed);
    assert_eq!(report.findings.len(), 1, "{:?}", report.findings);
    assert!(
        report.findings[0].contains("claim default/claim-2"),
        "{:?}",
        report.findings
    );
    assert_eq!(std::fs::read(home.path()).unwrap(), before);

    checkpoint
        .commit(vec![
            Change::DeleteClaim(uid(1)),
            Change::DeleteClaim(uid(2)),
        ])
        .await
        .unwrap();
    checkpoint.close().await;
    let report = verify(&home.path()).unwrap();
    assert_eq!(report.integrity, Integrity::Clean);
    assert!(
        report.findings[0].contains("pod default/pod-1"),
        "{:?}",
        report.findings
    );
    assert!(!report.is_good());
}

#[tokio::test]
async fn verify_counts_every_kind_of_record() {
    let home = Home::new();
    let checkpoint = home.open().checkpoint;
    let released = |n| ReleaseRecord {
        id: claim(n, "").id,
        at_ms: 1,
        by: Caller {
            uid: Some(0),
            user: None,
            pid: None,
        },
        pods: [].into(),
        untold: BTreeMap::new(),
        put_back: Vec::new(),
        timeline: VecDeque::new(),
        unknown: BTreeMap::new(),
    };
    let mut changes: Vec<_> = (1..=4)
        .map(|n| Change::PutReleased(Arc::new(released(n))))
        .collect();
    let of_a_resource = ClaimRecord {
        resource: Some(ResourceDevices {
            resource: "example.com/gpu".parse().unwrap(),
            devices: BTreeMap::from([("gpu-0".to_owned(), vec![0])]),
        }),
        ..claim(2, "test")
    };
    changes.extend([
        Change::PutPod(Arc::new(pod(1))),
        put(1),
        Change::PutClaim(Arc::new(of_a_resource)),
    ]);
    checkpoint.commit(changes).await.unwrap();
    let report = verify(&home.path()).unwrap();
    let found = (
        report.claims,
        report.pods,
        report.released,
        report.extended_resources,
    );
    assert_eq!(found, (2, 1, 4, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn file_is_readable_during_commits() {
    let home = Home::new();
    let checkpoint = home.open().checkpoint;
    checkpoint
        .commit((0..200).map(put).collect())
        .await
        .unwrap();
    let path = home.path();
    let reader = tokio::task::spawn_blocking(move || {
        for _ in 0..20 {
            match read(&path) {
                Ok(dump) => assert_eq!((dump.claims.len(), dump.skipped.len()), (200, 0)),
                Err(error) => assert!(matches!(error, ReadError::Busy { .. }), "{error}"),
            }
        }
    });
    let mut n = 0;
    while !reader.is_finished() {
        checkpoint.commit(vec![put(n % 200)]).await.unwrap();
        n += 1;
    }
    reader.await.unwrap();
}

impl Checkpoint {
    /// Commits only a time, durably: tests whether the disk accepts writes again, and ends the degraded state if it does.
    pub(crate) async fn probe(&self) -> Result<(), CommitError> {
        self.enter(Work::Commit(Vec::new())).await
    }
}
