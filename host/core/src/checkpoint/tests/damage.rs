//! Files that are damaged, of another program, or of another release.

use super::*;
use nodedock_model::{ExtendedResource, OfferSource};

fn prepare_file(home: &Home, bytes: &[u8]) {
    std::fs::create_dir_all(home.path().parent().unwrap()).unwrap();
    std::fs::write(home.path(), bytes).unwrap();
}

async fn filled(home: &Home) {
    let checkpoint = home.open().checkpoint;
    checkpoint.commit((0..20).map(put).collect()).await.unwrap();
    checkpoint.close().await;
}

/// Checks that the file is set aside unchanged, and that a new one accepts commits.
async fn is_set_aside(home: &Home) -> String {
    let before = std::fs::read(home.path()).unwrap();
    let opened = home.open();
    let set_aside = opened.set_aside.expect("set aside");
    assert_eq!(std::fs::read(&set_aside.path).unwrap(), before);
    let name = set_aside
        .path
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .to_owned();
    assert!(
        name.starts_with("checkpoint.db.damaged-20") && name.contains("Z"),
        "{name}"
    );
    assert!(opened.dump.claims.is_empty());
    opened.checkpoint.commit(vec![put(1)]).await.unwrap();
    opened.checkpoint.close().await;
    set_aside.reason
}

#[tokio::test]
async fn damaged_files_are_set_aside_separately() {
    let home = Home::new();
    filled(&home).await;
    let whole = std::fs::read(home.path()).unwrap();
    let garbage = "not a database\n".repeat(1000);
    let damaged = [
        (garbage.as_bytes(), "no SQLite file"),
        (b"SQLite", "header"),
        (&whole[..whole.len() / 3], "malformed"),
    ];
    for (bytes, reason) in damaged {
        prepare_file(&home, bytes);
        assert!(is_set_aside(&home).await.contains(reason));
        assert_eq!(read(&home.path()).unwrap().claims.len(), 1);
    }
    let aside = home
        .names()
        .into_iter()
        .filter(|name| name.contains("damaged"))
        .count();
    assert_eq!(aside, damaged.len(), "{:?}", home.names());
}

#[tokio::test]
async fn another_programs_database_is_set_aside() {
    let home = Home::new();
    prepare_file(&home, b"");
    raw(&home).execute_batch("CREATE TABLE other (n)").unwrap();
    assert!(is_set_aside(&home).await.contains("another program's"));
    // One that says it is ours, and is none.
    std::fs::remove_file(home.path()).unwrap();
    let ours = i64::from(super::super::database::APPLICATION_ID);
    raw(&home)
        .pragma_update(None, "application_id", ours)
        .unwrap();
    raw(&home)
        .execute_batch("PRAGMA journal_mode = WAL; CREATE TABLE other (n)")
        .unwrap();
    assert!(is_set_aside(&home).await.contains("the tables other"));
}

/// The log goes with its file, and one without a file is not taken for the new file's.
#[tokio::test]
async fn log_is_set_aside_with_file() {
    let home = Home::new();
    let checkpoint = home.open().checkpoint;
    checkpoint.commit(vec![put(1)]).await.unwrap();
    let log = file::log_of(&home.path());
    let (whole, logged) = (
        std::fs::read(home.path()).unwrap(),
        std::fs::read(&log).unwrap(),
    );
    checkpoint.close().await;
    let mut damaged = whole.clone();
    damaged[..16].fill(0);
    prepare_file(&home, &damaged);
    std::fs::write(&log, &logged).unwrap();
    let aside = home.open().set_aside.unwrap().path;
    assert_eq!(std::fs::read(file::log_of(&aside)).unwrap(), logged);

    // A crash between the two renames.
    std::fs::remove_file(home.path()).unwrap();
    std::fs::write(&log, &logged).unwrap();
    let opened = home.open();
    assert!(opened.dump.is_empty());
    opened.checkpoint.close().await;
    assert!(
        home.names()
            .iter()
            .any(|name| name.starts_with("checkpoint.db-wal.damaged-")),
        "{:?}",
        home.names()
    );
}

#[tokio::test]
async fn empty_file_counts_as_new() {
    let home = Home::new();
    prepare_file(&home, b"");
    assert!(home.open().set_aside.is_none());
}

/// Flips bytes all over the file: opening always returns a checkpoint, no record is another than it was, and a file that is set aside is
/// unchanged.
#[tokio::test]
async fn damaged_bytes_never_prevent_opening() {
    let home = Home::new();
    filled(&home).await;
    let whole = std::fs::read(home.path()).unwrap();
    let records: Vec<_> = (0..20).map(|n| claim(n, "test")).collect();
    for at in (0..whole.len()).step_by(whole.len() / 97) {
        let mut bytes = whole.clone();
        for byte in bytes.iter_mut().skip(at).take(64) {
            *byte ^= 0xff;
        }
        prepare_file(&home, &bytes);
        let opened = home.open();
        if let Some(set_aside) = &opened.set_aside {
            assert_eq!(
                std::fs::read(&set_aside.path).unwrap(),
                bytes,
                "damage at {at}"
            );
            std::fs::remove_file(&set_aside.path).unwrap();
        }
        assert!(
            opened
                .dump
                .claims
                .iter()
                .all(|claim| records.contains(claim)),
            "damage at {at}"
        );
        opened.checkpoint.close().await;
    }
}

#[tokio::test]
async fn newer_format_is_refused_unchanged() {
    let home = Home::new();
    filled(&home).await;
    sign(&raw(&home), 3, "nodedock 9.0.0");
    let before = std::fs::read(home.path()).unwrap();
    let error = open(&home.path()).err().unwrap();
    assert!(
        matches!(
            error,
            OpenError::Newer {
                found: 3,
                known: FORMAT_VERSION,
                ..
            }
        ),
        "{error}"
    );
    let text = error.to_string();
    assert!(
        text.contains(home.path().to_str().unwrap()) && text.contains("nodedock 9.0.0"),
        "{text}"
    );
    assert!(matches!(
        read(&home.path()),
        Err(ReadError::Newer { found: 3, .. })
    ));
    assert_eq!(std::fs::read(home.path()).unwrap(), before);
    assert_eq!(home.names(), ["checkpoint.db"]);
}

#[tokio::test]
async fn unreadable_record_is_reported_and_kept() {
    let home = Home::new();
    filled(&home).await;
    let cases = [
        (1, 1, "", "EOF"),
        (2, 2, "{}", "version 2"),
        (3, 1, "{\"id\":", "EOF"),
        (4, 1, "{}", "missing field"),
        (5, -1, "{}", "version -1"),
    ];
    for (n, version, record, _) in cases {
        write_raw(&home, Table::Claims, uid(n).as_str(), version, record);
    }
    write_raw(&home, Table::Claims, "no uid/", 1, "{}");
    let damage = "UPDATE records SET record = replace(record, 'claim-6', 'claim-7') WHERE key = ?1";
    assert_eq!(raw(&home).execute(damage, [uid(6).as_str()]).unwrap(), 1);
    raw(&home)
        .execute_batch(
            "INSERT INTO records SELECT 99, 'later', key, 9, 0, x'ff' FROM records LIMIT 1",
        )
        .unwrap();

    let opened = home.open();
    assert_eq!(opened.dump.claims.len(), 14);
    assert_eq!(opened.dump.skipped.len(), 7);
    for ((n, _, record, reason), skipped) in cases.into_iter().zip(&opened.dump.skipped[1..]) {
        assert_eq!(
            (skipped.key.as_str(), skipped.bytes),
            (uid(n).as_str(), record.len())
        );
        assert!(skipped.reason.contains(reason), "{skipped:?}");
    }
    assert!(
        opened.dump.skipped[6].reason.contains("checksum"),
        "{:?}",
        opened.dump.skipped
    );
    // Written again, twice: the old value is stored once. Deleted: stored as well.
    opened
        .checkpoint
        .commit(vec![put(2), put(2)])
        .await
        .unwrap();
    opened
        .checkpoint
        .commit(vec![put(2), Change::DeleteClaim(uid(3))])
        .await
        .unwrap();
    opened.checkpoint.close().await;

    let opened = home.open();
    assert_eq!(
        (opened.dump.claims.len(), opened.dump.skipped.len()),
        (15, 5)
    );
    opened.checkpoint.close().await;
    let report = verify(&home.path()).unwrap();
    assert_eq!(
        (report.unreadable, report.skipped.len(), report.is_good()),
        (2, 5, false)
    );
    let kept: Vec<(i64, String)> = {
        let database = raw(&home);
        let mut query = database
            .prepare("SELECT version, record FROM unreadable ORDER BY name")
            .unwrap();
        query
            .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))
            .unwrap()
            .map(Result::unwrap)
            .collect()
    };
    assert_eq!(
        kept,
        [(2, cases[1].2.to_owned()), (1, cases[2].2.to_owned())]
    );
}

#[tokio::test]
async fn first_record_of_duplicate_key_wins() {
    let home = Home::new();
    filled(&home).await;
    let copy = "INSERT INTO records (kind, key, version, checksum, record)
        SELECT kind, key, version, checksum, record FROM records WHERE key = ?1";
    raw(&home).execute(copy, [uid(3).as_str()]).unwrap();
    let opened = home.open();
    assert_eq!(
        (opened.dump.claims.len(), opened.dump.skipped.len()),
        (20, 1)
    );
    assert!(
        opened.dump.skipped[0].reason.contains("the same key"),
        "{:?}",
        opened.dump.skipped
    );
}

#[tokio::test]
async fn records_are_read_in_file_order() {
    let (home, many) = (Home::new(), super::super::format::BATCH * 6 + 7);
    let checkpoint = home.open().checkpoint;
    checkpoint
        .commit((0..many).map(put).collect())
        .await
        .unwrap();
    checkpoint.close().await;
    // The first record is damaged, and the last is the second of its key.
    raw(&home)
        .execute(
            "UPDATE records SET checksum = checksum + 1 WHERE id = 1",
            [],
        )
        .unwrap();
    let copy = "INSERT INTO records (kind, key, version, checksum, record)
        SELECT kind, key, version, checksum, record FROM records WHERE id = 2";
    raw(&home).execute(copy, []).unwrap();
    let dump = home.open().dump;
    assert_eq!(dump.claims.len(), many - 1);
    assert!(
        dump.claims.is_sorted_by(|a, b| a.id.uid < b.id.uid),
        "each once"
    );
    let reasons: Vec<_> = dump
        .skipped
        .iter()
        .map(|skipped| skipped.reason.as_str())
        .collect();
    assert_eq!(reasons.len(), 2);
    for words in ["checksum does not match", "the same key"] {
        assert!(
            reasons.iter().any(|reason| reason.contains(words)),
            "{reasons:?}"
        );
    }
}

#[tokio::test]
async fn record_under_wrong_key_is_skipped() {
    let home = Home::new();
    filled(&home).await;
    let record = serde_json::to_string(&claim(7, "test")).unwrap();
    write_raw(&home, Table::Claims, uid(8).as_str(), 1, &record);
    let opened = home.open();
    assert_eq!(
        (opened.dump.claims.len(), opened.dump.skipped.len()),
        (19, 1)
    );
    assert!(opened.dump.skipped[0].reason.contains(uid(7).as_str()));
}

#[tokio::test]
async fn damaged_file_is_reported_unchanged() {
    let home = Home::new();
    assert!(matches!(read(&home.path()), Err(ReadError::Io { .. })));
    prepare_file(&home, b"garbage");
    assert!(matches!(read(&home.path()), Err(ReadError::Damaged { .. })));
    assert!(matches!(
        verify(&home.path()),
        Err(ReadError::Damaged { .. })
    ));
    assert_eq!(std::fs::read(home.path()).unwrap(), b"garbage");
}

#[tokio::test]
async fn directory_instead_of_file_is_refused() {
    let home = Home::new();
    std::fs::create_dir_all(home.path().join("precious")).unwrap();
    assert!(matches!(open(&home.path()), Err(OpenError::Io { .. })));
    assert!(home.path().join("precious").exists());
}

/// Each kind of records about offers: its key, a record, and the change that puts it.
fn of_offers() -> Vec<(Table, Uid, Change)> {
    let resource: ExtendedResource = "example.com/gpu".parse().unwrap();
    let driver: DriverName = "gpu.example.com".parse().unwrap();
    let adapter = AdapterRecord::new(resource.clone(), driver.clone(), "gpus".parse().unwrap());
    let driver_offer = DriverOffer {
        driver: driver.clone(),
        starts: ["6f1c2d7e".to_owned()].into(),
        registered: true,
    };
    let resource_offer = ResourceOffer {
        resource,
        source: OfferSource::Driver(driver),
        devices: Vec::new(),
    };
    let mechanisms = Change::PutMechanisms(Arc::default());
    vec![
        (Table::Adapters, adapter.key(), adapter.put()),
        (Table::Mechanisms, MechanismsRecord::key(), mechanisms),
        (Table::DriverOffers, driver_offer.key(), driver_offer.put()),
        (
            Table::ResourceOffers,
            resource_offer.key(),
            resource_offer.put(),
        ),
    ]
}

#[tokio::test]
async fn malformed_offer_is_reported_and_kept() {
    for (table, key, change) in of_offers() {
        for (version, record, why) in [
            (1, "{", "EOF"),
            (1, "{}", "missing field"),
            (2, "{}", "the record has version 2"),
        ] {
            let home = Home::new();
            filled(&home).await;
            write_raw(&home, table, key.as_str(), version, record);
            let opened = home.open();
            let [skipped] = &opened.dump.skipped[..] else {
                panic!("{table}: {:?}", opened.dump.skipped)
            };
            assert_eq!((skipped.table, skipped.key.as_str()), (table, key.as_str()));
            assert!(skipped.reason.contains(why), "{table}: {}", skipped.reason);
            assert_eq!(opened.dump.unreadable_of(table).count(), 1);
            assert_eq!(opened.dump.claims.len(), 20);
            opened
                .checkpoint
                .commit(vec![change.clone()])
                .await
                .unwrap();
            opened.checkpoint.close().await;
            let kept: String = raw(&home)
                .query_row("SELECT record FROM unreadable", [], |row| row.get(0))
                .unwrap();
            assert_eq!(kept, record, "{table}");
            let dump = read(&home.path()).unwrap();
            assert!(dump.skipped.is_empty() && dump.unreadable == 1, "{table}");
        }
    }
}

#[tokio::test]
async fn offer_under_wrong_key_is_skipped() {
    for (table, _, change) in of_offers() {
        // The one record of its kind says nothing of its key.
        if table == Table::Mechanisms {
            continue;
        }
        let home = Home::new();
        filled(&home).await;
        let opened = home.open();
        opened.checkpoint.commit(vec![change]).await.unwrap();
        opened.checkpoint.close().await;
        let select = "SELECT record FROM records WHERE kind = ?1";
        let record: String = raw(&home)
            .query_row(select, [table.as_str()], |row| row.get(0))
            .unwrap();
        write_raw(&home, table, "another", 1, &record);
        let dump = read(&home.path()).unwrap();
        let [skipped] = &dump.skipped[..] else {
            panic!("{table}: {:?}", dump.skipped)
        };
        assert!(
            skipped.reason.contains("the record has the key"),
            "{skipped:?}"
        );
    }
}
