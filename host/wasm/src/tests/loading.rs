use super::*;

async fn says(stage: &Stage, bytes: impl Into<Bytes>) -> String {
    let error = stage.refusal(bytes).await;
    format!("{}: {error}", error.code())
}

#[tokio::test]
async fn both_forms_are_taken_and_say_the_same() {
    let stage = Stage::new();
    let guest = Guest { env: Some("TINY_*"), ..Guest::default() };
    let module = stage.load(&guest).await;
    let component = stage.try_load(guest.component(), "env: [\"*\"]").await.unwrap();
    assert_eq!(module.info(), component.info());
    assert_eq!(module.info().name.as_str(), guest::NAME);
    assert_eq!(module.surface().form, Some(Form::CoreModule));
    assert_eq!(component.surface().form, Some(Form::Component));
    assert_eq!(component.surface().contract().as_deref(), Some("nodedock:driver@0.1.0"));
    assert_eq!(component.surface().profile(), Some(Profile::Pure));
    assert_eq!(module.missing_grants(), ["env: TINY_*"]);
    assert!(component.missing_grants().is_empty());
    assert!(!module.has_health() && !module.has_configuration());
}

#[tokio::test]
async fn a_file_that_is_no_driver_is_named_for_what_it_is() {
    let stage = Stage::new();
    let good = Guest::default().module();
    let engine = wasmtime::Engine::default();
    let compiled = engine.precompile_component(&Guest::default().component()).unwrap();
    let mut broken = good.clone();
    broken[10] = 0xff;
    for (bytes, wanted) in [
        (Vec::new(), "file-empty"),
        (b"#!/bin/sh\n".to_vec(), "not-wasm: the file is not WebAssembly: it starts with \"#!/bin/sh\\n\""),
        (b"(module)".to_vec(), "wasm-text"),
        (compiled, "precompiled"),
        (b"\0as".to_vec(), "wasm-truncated"),
        (good[..6].to_vec(), "wasm-truncated"),
        (good[..good.len() / 2].to_vec(), "wasm-truncated"),
        (Guest::default().component()[..200].to_vec(), "wasm-truncated"),
        (broken, "wasm-invalid"),
        (b"\0asm\x09\0\0\0".to_vec(), "not-wasm: the file is WebAssembly of unknown kind (version 0x9)"),
        (wat::parse_str("(module)").unwrap(), "no-contract"),
        (wat::parse_str("(component)").unwrap(), "missing-exports"),
        (
            vec![0; 1 + usize::try_from(nodedock_model::limit::DRIVER_FILE_BYTES_MAX).unwrap()],
            "file-too-large",
        ),
    ] {
        let text = says(&stage, bytes).await;
        assert!(text.starts_with(wanted), "{wanted}: {text}");
    }
}

#[tokio::test]
async fn imports_that_nobody_has_are_named_with_a_hint() {
    let stage = Stage::new();
    for (import, hint) in [
        ("(import \"env\" \"puts\" (func))", "env: functions of C"),
        ("(import \"__wbindgen_placeholder__\" \"x\" (func))", "__wbindgen_placeholder__: a dependency"),
        (
            "(import \"wasi_snapshot_preview1\" \"fd_write\" (func))",
            "wasi_snapshot_preview1: it was built for wasm32-wasip1",
        ),
    ] {
        let text = says(&stage, wat::parse_str(format!("(module {import})")).unwrap()).await;
        assert!(text.starts_with("unknown-imports") && text.contains(hint), "{text}");
    }
    for (import, hint) in [
        ("wasi:sockets/network@0.2.6", "no network"),
        ("wasi:filesystem/types@0.3.0", "WASI 0.3"),
        ("wasi:http/types@0.2.6", "no network"),
        ("wasi:nn/tensor@0.2.0", "io, cli, clocks and random"),
        ("nodedock:driver/teleport@0.1.9", "newer version of the contract"),
    ] {
        let text =
            says(&stage, wat::parse_str(format!("(component (import \"{import}\" (instance)))")).unwrap())
                .await;
        assert!(
            text.starts_with("unknown-imports") && text.contains(import) && text.contains(hint),
            "{text}"
        );
    }
}

#[tokio::test]
async fn another_version_of_the_contract_is_said_and_a_later_patch_is_taken() {
    let stage = Stage::new();
    let text = says(&stage, Guest { version: "0.2.0", ..Guest::default() }.module()).await;
    assert!(text.contains("nodedock:driver@0.2.0") && text.contains("0.1.x"), "{text}");
    let text = says(&stage, Guest { version: "0.1.0-rc.1", ..Guest::default() }.module()).await;
    assert!(text.starts_with("contract-version"), "{text}");
    stage.load(&Guest { version: "0.1.7", ..Guest::default() }).await;
}

#[tokio::test]
async fn missing_exports_and_foreign_types_are_named() {
    let stage = Stage::new();
    let half = "(component (instance $i) (export \"nodedock:driver/identity@0.1.0\" (instance $i)))";
    let text = says(&stage, wat::parse_str(half).unwrap()).await;
    assert!(text.contains("discovery, preparation"), "{text}");
    let hollow = "(component (instance $i)
        (export \"nodedock:driver/identity@0.1.0\" (instance $i))
        (export \"nodedock:driver/discovery@0.1.0\" (instance $i))
        (export \"nodedock:driver/preparation@0.1.0\" (instance $i)))";
    let text = says(&stage, wat::parse_str(hollow).unwrap()).await;
    assert!(text.starts_with("contract-types") && text.contains("describe"), "{text}");
    let other = "(component
        (core module $m (func (export \"f\") (result i32) i32.const 1))
        (core instance $c (instantiate $m))
        (func $f (result u32) (canon lift (core func $c \"f\")))
        (instance $identity (export \"describe\" (func $f)))
        (instance $discovery (export \"discover\" (func $f)))
        (instance $preparation (export \"prepare\" (func $f)) (export \"unprepare\" (func $f)))
        (export \"nodedock:driver/identity@0.1.0\" (instance $identity))
        (export \"nodedock:driver/discovery@0.1.0\" (instance $discovery))
        (export \"nodedock:driver/preparation@0.1.0\" (instance $preparation)))";
    let text = says(&stage, wat::parse_str(other).unwrap()).await;
    assert!(text.starts_with("contract-types"), "{text}");
}

#[tokio::test]
async fn components_inside_a_component_are_refused() {
    let nested = "(component (component $inner (core module (func))) (instance (instantiate $inner)))";
    let text = says(&Stage::new(), wat::parse_str(nested).unwrap()).await;
    assert!(text.starts_with("composed"), "{text}");
}

#[tokio::test]
async fn a_describe_that_fails_says_how() {
    let stage = Stage::new();
    let spin = "(loop $l (br $l)) unreachable";
    for (guest, wanted) in [
        (Guest { describe: "unreachable".into(), ..Guest::default() }, "the driver trapped"),
        (Guest { describe: spin.into(), ..Guest::default() }, "of CPU"),
        (Guest { extra: format!("(func $s {spin}) (start $s)"), ..Guest::default() }, "of CPU"),
        (
            Guest {
                describe: "(drop (memory.grow (i32.const 20000))) i32.const 1024".into(),
                ..Guest::default()
            },
            "64 MiB",
        ),
        (Guest { pages: 2000, ..Guest::default() }, "64 MiB"),
        (Guest { describe: "i32.const 8192".into(), ..Guest::default() }, "driver name \"\" is not valid"),
        (Guest { env: Some("a/b"), ..Guest::default() }, "capabilities: env"),
    ] {
        // The default of two seconds is for drivers that work; here it would be spent.
        let outcome = stage.try_load(guest.module(), "limits: {cpuMs: 50}").await;
        let text = outcome.map(|driver| driver.info().clone()).unwrap_err().to_string();
        assert!(text.contains(wanted), "{wanted}: {text}");
    }
}

#[tokio::test]
async fn inspection_says_what_it_can_of_a_file_that_is_refused() {
    let stage = Stage::new();
    let bytes: Bytes = Guest { version: "0.2.0", ..Guest::default() }.module().into();
    let file = DriverFile { name: "old.wasm".into(), bytes: bytes.clone() };
    let seen = stage.host.inspect(file, &Grant::empty()).await;
    assert_eq!((seen.size, seen.surface.form), (bytes.len(), Some(Form::CoreModule)));
    assert_eq!(seen.surface.contract().as_deref(), Some("nodedock:driver@0.2.0"));
    assert!(seen.digest.starts_with("sha256:") && seen.info.is_none());
    assert_eq!(seen.error.unwrap().code(), "contract-version");
}

#[tokio::test]
async fn a_compiled_driver_is_kept_and_a_damaged_one_is_made_anew() {
    let stage = Stage::on(tempfile::tempdir().unwrap(), true);
    let guest = Guest::default();
    assert!(!stage.load(&guest).await.from_cache());
    assert!(stage.load(&guest).await.from_cache());

    let stage = Stage::on(stage.directory, true);
    assert!(stage.load(&guest).await.from_cache(), "by the next daemon too");
    let kept: Vec<_> =
        std::fs::read_dir(stage.directory.path().join("cache")).unwrap().map(|e| e.unwrap().path()).collect();
    let compiled = kept.iter().find(|path| path.extension().is_some_and(|e| e == "cwasm")).unwrap();
    let mut bytes = std::fs::read(compiled).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    // A new file: the old one is mapped, and stays as it is for those who have it.
    std::fs::remove_file(compiled).unwrap();
    std::fs::write(compiled, bytes).unwrap();
    assert!(!stage.load(&guest).await.from_cache());
    assert!(stage.load(&guest).await.from_cache());
}
