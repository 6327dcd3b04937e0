//! Files that are damaged, of another program, or of another release.

use super::*;

/// Changes the raw database, as another release would.
fn edit(home: &Home, edit: impl FnOnce(&redb::WriteTransaction)) {
    let database = Builder::new().create(home.path()).unwrap();
    let write = database.begin_write().unwrap();
    edit(&write);
    write.commit().unwrap();
}

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
    let name = set_aside.path.file_name().unwrap().to_str().unwrap().to_owned();
    assert!(name.starts_with("checkpoint.redb.damaged-20") && name.contains("Z"), "{name}");
    assert!(opened.dump.claims.is_empty());
    opened.checkpoint.commit(vec![put(1)]).await.unwrap();
    opened.checkpoint.close().await;
    set_aside.reason
}

#[tokio::test]
async fn garbage_and_a_truncated_file_are_set_aside_under_names_of_their_own() {
    let home = Home::new();
    filled(&home).await;
    let whole = std::fs::read(home.path()).unwrap();
    let garbage = "not a database\n".repeat(1000);
    let damaged = [(garbage.as_bytes(), "magic"), (b"redb", ""), (&whole[..whole.len() / 3], "")];
    for (bytes, reason) in damaged {
        prepare_file(&home, bytes);
        assert!(is_set_aside(&home).await.contains(reason));
        assert_eq!(read(&home.path()).unwrap().claims.len(), 1);
    }
    assert_eq!(home.names().len(), 1 + damaged.len(), "{:?}", home.names());
}

#[tokio::test]
async fn another_programs_database_is_set_aside() {
    const OTHER: redb::TableDefinition<'_, u64, u64> = redb::TableDefinition::new("other");
    let home = Home::new();
    prepare_file(&home, b"");
    edit(&home, |write| drop(write.open_table(OTHER).unwrap().insert(1, 2).unwrap()));
    assert!(is_set_aside(&home).await.contains("other"));
}

#[tokio::test]
async fn an_empty_file_is_a_new_one() {
    let home = Home::new();
    prepare_file(&home, b"");
    assert!(home.open().set_aside.is_none());
}

/// Flips bytes all over the file: opening always returns a checkpoint, and a file that is set aside is unchanged.
#[tokio::test]
async fn no_damaged_byte_prevents_the_start() {
    let home = Home::new();
    filled(&home).await;
    let whole = std::fs::read(home.path()).unwrap();
    for at in (0..whole.len()).step_by(whole.len() / 97) {
        let mut bytes = whole.clone();
        for byte in bytes.iter_mut().skip(at).take(64) {
            *byte ^= 0xff;
        }
        prepare_file(&home, &bytes);
        let opened = home.open();
        if let Some(set_aside) = &opened.set_aside {
            assert_eq!(std::fs::read(&set_aside.path).unwrap(), bytes, "damage at {at}");
            std::fs::remove_file(&set_aside.path).unwrap();
        }
        opened.checkpoint.close().await;
    }
}

#[tokio::test]
async fn a_newer_format_is_refused_by_name_and_left_alone() {
    let home = Home::new();
    filled(&home).await;
    edit(&home, |write| {
        let mut meta = write.open_table(META).unwrap();
        meta.insert("format", "2").unwrap();
        meta.insert("written-by", "nodedock 9.0.0").unwrap();
    });
    let before = std::fs::read(home.path()).unwrap();
    let error = open(&home.path()).err().unwrap();
    assert!(matches!(error, OpenError::Newer { found: 2, known: FORMAT_VERSION, .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains(home.path().to_str().unwrap()) && text.contains("nodedock 9.0.0"), "{text}");
    assert!(matches!(read(&home.path()), Err(ReadError::Newer { found: 2, .. })));
    assert_eq!(std::fs::read(home.path()).unwrap(), before);
    assert_eq!(home.names(), ["checkpoint.redb"]);
}

#[tokio::test]
async fn an_unreadable_record_is_reported_and_kept_and_the_rest_is_served() {
    let home = Home::new();
    filled(&home).await;
    let cases: [(usize, &[u8], &str); 4] = [
        (1, b"", "empty"),
        (2, b"\x02{}", "version 2"),
        (3, b"\x01{\"id\":", "EOF"),
        (4, b"\x01{}", "missing field"),
    ];
    edit(&home, |write| {
        let mut claims = write.open_table(Table::Claims.definition()).unwrap();
        for (n, value, _) in cases {
            claims.insert(uid(n).as_str(), value).unwrap();
        }
        claims.insert("no uid/", format::VALUE_VERSION.to_string().as_bytes()).unwrap();
    });

    let opened = home.open();
    assert_eq!(opened.dump.claims.len(), 16);
    assert_eq!(opened.dump.skipped.len(), 5);
    for ((n, value, reason), skipped) in cases.into_iter().zip(&opened.dump.skipped[1..]) {
        assert_eq!((skipped.key.as_str(), skipped.bytes), (uid(n).as_str(), value.len()));
        assert!(skipped.reason.contains(reason), "{skipped:?}");
    }
    // Written again, twice: the old value is stored once. Deleted: stored as well.
    opened.checkpoint.commit(vec![put(2), put(2)]).await.unwrap();
    opened.checkpoint.commit(vec![put(2), Change::DeleteClaim(uid(3))]).await.unwrap();
    opened.checkpoint.close().await;

    let opened = home.open();
    assert_eq!((opened.dump.claims.len(), opened.dump.skipped.len()), (17, 3));
    opened.checkpoint.close().await;
    let report = verify(&home.path()).unwrap();
    assert_eq!((report.unreadable, report.skipped.len(), report.is_good()), (2, 3, false));
    let database = Builder::new().open(home.path()).unwrap();
    use redb::{ReadableDatabase, ReadableTable};
    let kept = database.begin_read().unwrap().open_table(UNREADABLE).unwrap();
    let values: Vec<Vec<u8>> = kept.iter().unwrap().map(|e| e.unwrap().1.value().to_vec()).collect();
    assert_eq!(values, [cases[1].1.to_vec(), cases[2].1.to_vec()]);
}

#[tokio::test]
async fn a_record_under_anothers_key_is_not_taken_for_it() {
    let home = Home::new();
    filled(&home).await;
    let value = format::encode(put(7)).unwrap().value.unwrap();
    edit(&home, |write| {
        let mut claims = write.open_table(Table::Claims.definition()).unwrap();
        claims.insert(uid(8).as_str(), value.as_slice()).unwrap();
    });
    let opened = home.open();
    assert_eq!((opened.dump.claims.len(), opened.dump.skipped.len()), (19, 1));
    assert!(opened.dump.skipped[0].reason.contains(uid(7).as_str()));
}

#[tokio::test]
async fn what_is_damaged_or_missing_is_named_to_a_reader_and_left_alone() {
    let home = Home::new();
    assert!(matches!(read(&home.path()), Err(ReadError::Io { .. })));
    prepare_file(&home, b"garbage");
    assert!(matches!(read(&home.path()), Err(ReadError::Damaged { .. })));
    assert!(matches!(verify(&home.path()), Err(ReadError::Damaged { .. })));
    assert_eq!(std::fs::read(home.path()).unwrap(), b"garbage");
}

#[tokio::test]
async fn a_directory_in_the_files_place_is_an_error_and_stays() {
    let home = Home::new();
    std::fs::create_dir_all(home.path().join("precious")).unwrap();
    assert!(matches!(open(&home.path()), Err(OpenError::Io { .. })));
    assert!(home.path().join("precious").exists());
}
