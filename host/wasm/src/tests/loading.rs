use super::*;

async fn says(stage: &Stage, bytes: impl Into<Bytes>) -> String {
    let error = stage.refusal(bytes).await;
    format!("{}: {error}", error.code())
}

#[tokio::test]
async fn modules_and_components_load_alike() {
    let stage = Stage::new();
    let guest = Guest {
        env: Some("TINY_*"),
        ..Guest::default()
    };
    let module = stage.load(&guest).await;
    let component = stage
        .try_load(guest.component(), "env: [\"TINY_*\"]")
        .await
        .unwrap();
    assert_eq!(module.info(), component.info());
    assert_eq!(module.info().name.as_str(), guest::NAME);
    assert_eq!(module.surface().form, Some(Form::CoreModule));
    assert_eq!(component.surface().form, Some(Form::Component));
    assert_eq!(
        component.surface().contract().as_deref(),
        Some("nodedock:driver@0.2.0")
    );
    assert_eq!(component.surface().profile(), Some(Profile::Pure));
    assert_eq!(module.missing_grants(), ["env: TINY_*"]);
    assert!(component.missing_grants().is_empty());
    assert!(module.surface().facets().is_empty());
}

#[tokio::test]
async fn non_driver_file_is_identified() {
    let stage = Stage::new();
    for (bytes, expected) in [
        (b"\0as".to_vec(), "wasm-truncated"),
        (Guest::default().module()[..6].to_vec(), "wasm-truncated"),
        (
            Guest::default().component()[..200].to_vec(),
            "wasm-truncated",
        ),
        (wat::parse_str("(module)").unwrap(), "no-contract"),
        (wat::parse_str("(component)").unwrap(), "missing-exports"),
    ] {
        let text = says(&stage, bytes).await;
        assert!(text.starts_with(expected), "{expected}: {text}");
    }
}

#[tokio::test]
async fn unknown_imports_have_a_hint() {
    let stage = Stage::new();
    for (import, hint) in [
        ("(import \"env\" \"puts\" (func))", "env: functions of C"),
        (
            "(import \"__wbindgen_placeholder__\" \"x\" (func))",
            "__wbindgen_placeholder__: a dependency",
        ),
        (
            "(import \"wasi_snapshot_preview1\" \"fd_write\" (func))",
            "wasi_snapshot_preview1: it was built for wasm32-wasip1",
        ),
    ] {
        let text = says(
            &stage,
            wat::parse_str(format!("(module {import})")).unwrap(),
        )
        .await;
        assert!(
            text.starts_with("unknown-imports") && text.contains(hint),
            "{text}"
        );
    }
    for (import, hint) in [
        ("wasi:sockets/network@0.2.6", "no network"),
        ("wasi:filesystem/types@0.3.0", "WASI 0.3"),
        ("wasi:http/types@0.2.6", "no network"),
        ("wasi:nn/tensor@0.2.0", "io, cli, clocks and random"),
        (
            "nodedock:driver/teleport@0.2.9",
            "newer version of the contract",
        ),
    ] {
        let text = says(
            &stage,
            wat::parse_str(format!("(component (import \"{import}\" (instance)))")).unwrap(),
        )
        .await;
        assert!(
            text.starts_with("unknown-imports") && text.contains(import) && text.contains(hint),
            "{text}"
        );
    }
}

#[tokio::test]
async fn contract_prerelease_is_refused() {
    let stage = Stage::new();
    let text = says(
        &stage,
        Guest {
            version: "0.2.0-rc.1",
            ..Guest::default()
        }
        .module(),
    )
    .await;
    assert!(text.starts_with("contract-version"), "{text}");
    stage
        .load(&Guest {
            version: "0.2.7",
            ..Guest::default()
        })
        .await;
}

/// The file is a driver in C of the contract's first draft, which nothing was released for.
#[tokio::test]
async fn older_contract_error_names_both_versions() {
    let driver = include_bytes!("files/driver-of-contract-0.1.wasm");
    let text = says(&Stage::new(), driver.as_slice()).await;
    assert!(text.starts_with("contract-version"), "{text}");
    for part in [
        "nodedock:driver@0.1.0",
        "nodedock:driver@0.2.x",
        "matching SDK",
    ] {
        assert!(text.contains(part), "{text} lacks {part}");
    }
}

#[tokio::test]
async fn missing_exports_are_named() {
    let half =
        "(component (instance $i) (export \"nodedock:driver/identity@0.2.0\" (instance $i)))";
    let text = says(&Stage::new(), wat::parse_str(half).unwrap()).await;
    assert!(text.contains("discovery, preparation"), "{text}");
}

#[tokio::test]
async fn a_describe_that_fails_is_named() {
    let stage = Stage::new();
    let grow = "(drop (memory.grow (i32.const 20000))) i32.const 1024";
    for (guest, expected) in [
        (
            Guest {
                describe: "unreachable".into(),
                ..Guest::default()
            },
            "the driver trapped",
        ),
        (
            Guest {
                describe: grow.into(),
                ..Guest::default()
            },
            "64 MiB",
        ),
        (
            Guest {
                env: Some("a/b"),
                ..Guest::default()
            },
            "capabilities: env",
        ),
    ] {
        let text = stage.refusal(guest.module()).await.to_string();
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[tokio::test]
async fn refused_file_is_still_inspected() {
    let stage = Stage::new();
    let bytes: Bytes = Guest {
        version: "0.3.0",
        ..Guest::default()
    }
    .module()
    .into();
    let file = DriverFile {
        name: "old.wasm".into(),
        bytes: bytes.clone(),
    };
    let seen = stage.host.inspect(file, &Grant::empty()).await;
    assert_eq!(
        (seen.size, seen.surface.form),
        (bytes.len(), Some(Form::CoreModule))
    );
    assert_eq!(
        seen.surface.contract().as_deref(),
        Some("nodedock:driver@0.3.0")
    );
    assert!(seen.digest.starts_with("sha256:"));
    assert_eq!(seen.driver.err().unwrap().code(), "contract-version");
}

#[tokio::test]
async fn compiled_driver_is_cached_across_daemons() {
    let stage = Stage::on(tempfile::tempdir().unwrap(), true);
    let guest = Guest::default();
    assert!(!stage.load(&guest).await.from_cache());
    assert!(stage.load(&guest).await.from_cache());
    assert!(
        Stage::on(stage.directory, true)
            .load(&guest)
            .await
            .from_cache()
    );
}
