//! Files of other releases: older ones are upgraded, and newer fields are not lost.

use serde_json::{Value, json};

use super::*;
use nodedock_model::{Hold, PreparedClaim, PreparedDevice};

/// A claim with a value in every stored object.
fn full_claim() -> ClaimRecord {
    let mut record = claim(1, "prepare");
    let device: nodedock_model::AllocatedDevice = serde_json::from_value(
        json!({"request": "gpu", "driver": "gpu.example.com", "pool": "gpus", "device": "gpu-0"}),
    )
    .unwrap();
    let access = json!({"edits": {"deviceNodes": [{"path": "/dev/gpu0", "permissions": "rw"}]}});
    let prepared = PreparedDevice {
        requests: vec!["gpu".to_owned()],
        pool: device.pool.clone(),
        device: device.device.clone(),
        share_id: None,
        access: serde_json::from_value(access).unwrap(),
        status: None,
        attributes: None,
    };
    let part = record.drivers.values_mut().next().unwrap();
    part.prepared = Some(Arc::new(PreparedClaim {
        devices: vec![prepared],
        ..PreparedClaim::default()
    }));
    record.allocation.devices.push(device);
    record.holds.push(Hold {
        key: "gpu.example.com/gpus/gpu-0".to_owned(),
        shared: false,
        driver: None,
        derived: false,
        uses: Vec::new(),
    });
    record
}

fn full_pod() -> PodRecord {
    let claims = serde_json::from_value(json!([{"pod_claim_name": "gpu"}])).unwrap();
    PodRecord {
        containers: vec![PodContainer {
            name: "main".to_owned(),
            claims,
            ..PodContainer::default()
        }],
        ..pod(1)
    }
}

/// Objects with names that are not fields: of drivers, pods and claims, and of a variant.
const NOT_FIELDS: [&str; 4] = ["drivers", "pods", "claims", "access"];

/// Adds an unknown field to every object.
fn from_the_future(name: &str, value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields
                .iter_mut()
                .for_each(|(name, value)| from_the_future(name, value));
            if !NOT_FIELDS.contains(&name) {
                fields.insert("future".to_owned(), json!({"of": name, "retry": [1, 2]}));
            }
        }
        Value::Array(entries) => entries
            .iter_mut()
            .for_each(|entry| from_the_future("", entry)),
        _ => {}
    }
}

fn future_value(record: &impl serde::Serialize) -> Value {
    let mut value = serde_json::to_value(record).unwrap();
    from_the_future("", &mut value);
    value
}

fn read_raw(home: &Home, table: Table, key: &Uid) -> Value {
    let select = "SELECT record FROM records WHERE kind = ?1 AND key = ?2";
    let record: String = raw(home)
        .query_row(select, [table.as_str(), key.as_str()], |row| row.get(0))
        .unwrap();
    serde_json::from_str(&record).unwrap()
}

/// A file with a claim and a pod of a newer release.
async fn with_records_of_the_future() -> Home {
    let home = Home::new();
    home.open().checkpoint.close().await;
    write_raw(
        &home,
        Table::Claims,
        uid(1).as_str(),
        1,
        &future_value(&full_claim()).to_string(),
    );
    write_raw(
        &home,
        Table::Pods,
        uid(1).as_str(),
        1,
        &future_value(&full_pod()).to_string(),
    );
    home
}

async fn commit(home: &Home, changes: Vec<Change>) {
    let opened = home.open();
    opened.checkpoint.commit(changes).await.unwrap();
    opened.checkpoint.close().await;
}

#[tokio::test]
async fn unchanged_records_keep_unknown_fields() {
    let home = with_records_of_the_future().await;
    let Opened {
        dump:
            Dump {
                mut claims,
                mut pods,
                skipped,
                ..
            },
        checkpoint,
        ..
    } = home.open();
    assert!(skipped.is_empty(), "{skipped:?}");
    let changes = vec![
        Change::PutClaim(Arc::new(claims.remove(0))),
        Change::PutPod(Arc::new(pods.remove(0))),
    ];
    // Twice in one commit, and again: it is not added twice.
    checkpoint
        .commit([changes.clone(), changes.clone()].concat())
        .await
        .unwrap();
    checkpoint.commit(changes).await.unwrap();
    checkpoint.close().await;
    assert_eq!(
        read_raw(&home, Table::Claims, &uid(1)),
        future_value(&full_claim())
    );
    assert_eq!(
        read_raw(&home, Table::Pods, &uid(1)),
        future_value(&full_pod())
    );
}

#[tokio::test]
async fn changed_records_keep_unknown_fields() {
    let home = with_records_of_the_future().await;
    let future = future_value(&full_claim());
    let mut record = read(&home.path()).unwrap().claims.remove(0);
    record.state = ClaimState::Unpreparing;
    record
        .timeline
        .push_front(claim(1, "another").timeline[0].clone());
    record.holds[0].shared = true;
    let part = record.drivers.values_mut().next().unwrap();
    part.stale = true;
    Arc::make_mut(part.prepared.as_mut().unwrap()).memo = vec![1];
    commit(&home, vec![Change::PutClaim(Arc::new(record.clone()))]).await;

    let found = read_raw(&home, Table::Claims, &uid(1));
    let driver = "/drivers/gpu.example.com";
    let kept = |path: &str| assert_eq!(found.pointer(path), future.pointer(path), "{path}");
    for path in [
        "/future",
        "/id",
        "/pods",
        "/allocation",
        &format!("{driver}/future"),
        &format!("{driver}/prepared/future"),
        &format!("{driver}/prepared/devices"),
    ] {
        kept(path);
    }
    assert_eq!(
        found["timeline"][1], future["timeline"][0],
        "an entry has moved"
    );
    assert_eq!(found["timeline"][0].get("future"), None, "an entry is new");
    assert_eq!(
        found["holds"][0],
        json!({"key": "gpu.example.com/gpus/gpu-0", "shared": true}),
        "it changed"
    );

    record.drivers.values_mut().next().unwrap().prepared = None;
    commit(&home, vec![Change::PutClaim(Arc::new(record))]).await;
    commit(&home, vec![Change::PutClaim(Arc::new(full_claim()))]).await;
    let found = read_raw(&home, Table::Claims, &uid(1));
    let prepared = found.pointer(&format!("{driver}/prepared")).unwrap();
    assert_eq!(prepared.get("future"), None, "it is another result");
    commit(&home, vec![Change::DeleteClaim(uid(1))]).await;
    commit(&home, vec![Change::PutClaim(Arc::new(full_claim()))]).await;
    let plain = serde_json::to_value(full_claim()).unwrap();
    assert_eq!(
        read_raw(&home, Table::Claims, &uid(1)),
        plain,
        "it is another claim"
    );
}

fn rename_the_table(connection: &rusqlite::Connection) -> rusqlite::Result<()> {
    connection.execute_batch("ALTER TABLE entries RENAME TO records")
}

fn take_the_state_apart(mut record: Value) -> Result<Value, String> {
    let state = record
        .get_mut("prepared")
        .ok_or("it does not say whether it is prepared")?
        .take();
    record["state"] = json!(if state == true {
        "prepared"
    } else {
        "preparing"
    });
    record
        .as_object_mut()
        .ok_or("it is no object")?
        .remove("prepared");
    Ok(record)
}

/// A format of the tests, with a step to this release's.
const OLD: u32 = FORMAT_VERSION - 1;
const FROM_OLD: Upgrades = Upgrades {
    formats: &[(OLD, rename_the_table)],
    records: &[(0, take_the_state_apart)],
};

/// A file of a fictional older format, in which the table of records had another name and a claim a boolean instead of a state.
async fn of_an_older_format() -> Home {
    let home = Home::new();
    commit(&home, vec![put(1), put(2), put(3)]).await;
    for (n, prepared) in [(1, json!(true)), (2, json!(null))] {
        let mut record = serde_json::to_value(claim(n, "test")).unwrap();
        let fields = record.as_object_mut().unwrap();
        fields.remove("state");
        fields.insert("prepared".to_owned(), prepared);
        write_raw(
            &home,
            Table::Claims,
            uid(n).as_str(),
            0,
            &record.to_string(),
        );
    }
    write_raw(&home, Table::Claims, uid(3).as_str(), 0, "{}");
    let database = raw(&home);
    database
        .execute_batch("ALTER TABLE records RENAME TO entries")
        .unwrap();
    sign(&database, OLD, "nodedock 0.0.9");
    home
}

#[tokio::test]
async fn older_file_is_upgraded() {
    let home = of_an_older_format().await;
    let opened = open_with(&home.path(), &FROM_OLD).unwrap();
    let states: Vec<_> = opened
        .dump
        .claims
        .iter()
        .map(|claim| (&claim.id.uid, claim.state))
        .collect();
    assert_eq!(
        states,
        [
            (&uid(1), ClaimState::Prepared),
            (&uid(2), ClaimState::Preparing)
        ]
    );
    let reasons: Vec<_> = opened
        .dump
        .skipped
        .iter()
        .map(|skipped| skipped.reason.as_str())
        .collect();
    assert_eq!(reasons, ["it does not say whether it is prepared"]);
    opened.checkpoint.commit(vec![put(2)]).await.unwrap();
    opened.checkpoint.close().await;

    // Only written values have the new version; the tables have it at once.
    assert_eq!(read(&home.path()).unwrap().meta.format, FORMAT_VERSION);
    let versions: Vec<u8> = {
        let database = raw(&home);
        let mut query = database
            .prepare("SELECT version FROM records ORDER BY key")
            .unwrap();
        query
            .query_map([], |row| row.get(0))
            .unwrap()
            .map(Result::unwrap)
            .collect()
    };
    assert_eq!(versions, [0, 1, 0]);
    let again = open_with(&home.path(), &FROM_OLD).unwrap();
    assert_eq!((again.dump.claims.len(), again.dump.skipped.len()), (2, 1));
}

#[tokio::test]
async fn too_old_file_is_refused_unchanged() {
    let home = of_an_older_format().await;
    let before = std::fs::read(home.path()).unwrap();
    let error = open(&home.path()).err().unwrap();
    assert!(
        matches!(
            error,
            OpenError::Older {
                found: OLD,
                known: FORMAT_VERSION,
                ..
            }
        ),
        "{error}"
    );
    let text = error.to_string();
    assert!(
        text.contains(home.path().to_str().unwrap()) && text.contains("nodedock 0.0.9"),
        "{text}"
    );
    assert!(matches!(
        verify(&home.path()),
        Err(ReadError::Older { found: OLD, .. })
    ));
    assert_eq!(std::fs::read(home.path()).unwrap(), before);
    assert_eq!(home.names(), ["checkpoint.db"]);
}

#[tokio::test]
async fn failed_upgrade_leaves_file_unchanged() {
    fn fail(connection: &rusqlite::Connection) -> rusqlite::Result<()> {
        rename_the_table(connection)?;
        connection.execute_batch("INSERT INTO nowhere VALUES (1)")
    }
    let home = of_an_older_format().await;
    let before = verify_with(&home, &FROM_OLD);
    let upgrades = Upgrades {
        formats: &[(OLD, fail)],
        ..FROM_OLD
    };
    let opened = open_with(&home.path(), &upgrades).unwrap();
    let aside = opened
        .set_aside
        .expect("a table is missing, so it counts as damaged");
    opened.checkpoint.close().await;
    std::fs::rename(aside.path, home.path()).unwrap();
    assert_eq!(verify_with(&home, &FROM_OLD), before);
}

/// The claims that a release with these upgrades finds.
fn verify_with(home: &Home, upgrades: &Upgrades) -> Vec<ClaimRecord> {
    let copy = Home::new();
    std::fs::create_dir_all(copy.path().parent().unwrap()).unwrap();
    std::fs::copy(home.path(), copy.path()).unwrap();
    open_with(&copy.path(), upgrades).unwrap().dump.claims
}

#[tokio::test]
async fn current_format_fixture_is_read() {
    let home = Home::new();
    std::fs::create_dir_all(home.path().parent().unwrap()).unwrap();
    std::fs::copy(format!("{FIXTURES}/checkpoint-v1.db"), home.path()).unwrap();
    let Opened {
        dump, set_aside, ..
    } = home.open();
    assert_eq!(dump.claims.len(), 2, "{:?}", dump.skipped);
    assert_eq!(dump.claims[0].id.to_string(), "ml/train-gpu");
    assert_eq!(dump.claims[0].unknown["lease"], json!({"until": 7}));
    assert_eq!(dump.pods.len(), 1);
    assert!(dump.skipped.is_empty() && set_aside.is_none());
}

#[test]
fn upgrade_path_is_complete_or_absent() {
    let steps = [(1u32, "1 to 2"), (2, "2 to 3")];
    assert_eq!(upgrade::path(&steps, 1, 3), Some(vec!["1 to 2", "2 to 3"]));
    assert_eq!(upgrade::path(&steps, 3, 3), Some(vec![]));
    assert_eq!(upgrade::path(&steps, 0, 3), None);
}

/// Writes the file of a newer format for the tests of the daemon.
#[tokio::test]
#[ignore = "writes the fixture"]
async fn write_the_newer_fixture() {
    let home = Home::new();
    commit(&home, vec![put(1)]).await;
    sign(&raw(&home), 9, "nodedock 9.8.7");
    std::fs::copy(home.path(), format!("{FIXTURES}/checkpoint-newer.db")).unwrap();
}
