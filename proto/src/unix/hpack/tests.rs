use proptest::prelude::*;

use super::*;

type Fields = Vec<(String, String)>;

fn decode(decoder: &mut Decoder, block: &[u8]) -> Result<Fields, Malformed> {
    let mut fields = Vec::new();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    decoder.decode(block, |name, value| {
        fields.push((text(name), text(value)));
        Ok::<_, Malformed>(())
    })?;
    Ok(fields)
}

fn hex(text: &str) -> Vec<u8> {
    hex::decode(text.replace(' ', "")).unwrap()
}

fn fields(list: &[(&str, &str)]) -> Fields {
    list.iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect()
}

fn failure(block: &[u8]) -> Malformed {
    decode(&mut Decoder::default(), block).unwrap_err()
}

/// A field that the decoder must add to its table.
fn remembered(name: &str, value: &str) -> Vec<u8> {
    let mut block = Vec::new();
    literal(name.as_bytes(), value.as_bytes(), &mut block);
    block[0] = 0x40;
    block
}

#[test]
fn rfc_examples_decode_in_both_codings() {
    // RFC 7541, C.3 and C.4.
    let plain = [
        "8286 8441 0f77 7777 2e65 7861 6d70 6c65 2e63 6f6d",
        "8286 84be 5808 6e6f 2d63 6163 6865",
        "8287 85bf 400a 6375 7374 6f6d 2d6b 6579 0c63 7573 746f 6d2d 7661 6c75 65",
    ];
    let huffman = [
        "8286 8441 8cf1 e3c2 e5f2 3a6b a0ab 90f4 ff",
        "8286 84be 5886 a8eb 1064 9cbf",
        "8287 85bf 4088 25a8 49e9 5ba9 7d7f 8925 a849 e95b b8e8 b4bf",
    ];
    for blocks in [plain, huffman] {
        let mut decoder = Decoder::default();
        let mut next = |block| decode(&mut decoder, &hex(block)).unwrap();
        let (get, authority) = ((":method", "GET"), (":authority", "www.example.com"));
        let first = [get, (":scheme", "http"), (":path", "/"), authority];
        assert_eq!(next(blocks[0]), fields(&first));
        let second = [
            get,
            (":scheme", "http"),
            (":path", "/"),
            authority,
            ("cache-control", "no-cache"),
        ];
        assert_eq!(next(blocks[1]), fields(&second));
        let key = ("custom-key", "custom-value");
        assert_eq!(
            next(blocks[2]),
            fields(&[
                get,
                (":scheme", "https"),
                (":path", "/index.html"),
                authority,
                key
            ])
        );
        assert_eq!(decoder.size, 164);
    }
}

#[test]
fn old_entries_are_evicted() {
    // RFC 7541, C.6: responses, with a table of 256 bytes.
    let mut decoder = Decoder {
        size_max: 256,
        ..Decoder::default()
    };
    let first =
        "4882 6402 5885 aec3 771a 4b61 96d0 7abe 9410 54d4 44a8 2005 9504 0b81 66e0 82a6 2d1b ff6e 919d 29ad
                 1718 63c7 8f0b 97c8 e9ae 82ae 43d3"
            .replace('\n', "");
    decode(&mut decoder, &hex(&first)).unwrap();
    assert_eq!(decoder.size, 222);
    let second = decode(&mut decoder, &hex("4883 640e ff c1 c0 bf")).unwrap();
    assert_eq!(decoder.size, 222);
    let date = ("date", "Mon, 21 Oct 2013 20:13:21 GMT");
    let location = ("location", "https://www.example.com");
    assert_eq!(
        second,
        fields(&[
            (":status", "307"),
            ("cache-control", "private"),
            date,
            location
        ])
    );
    assert_eq!(decoder.entries.len(), 4);
}

#[test]
fn table_size_can_shrink_and_grow() {
    let mut decoder = Decoder::default();
    decode(&mut decoder, &remembered("a", "1")).unwrap();
    assert_eq!(
        decode(&mut decoder, &[0xbe]).unwrap(),
        fields(&[("a", "1")])
    );
    // To zero and back (0x20, then 4096): the table is empty.
    assert_eq!(decode(&mut decoder, &hex("20 3fe11f")), Ok(vec![]));
    assert_eq!(decode(&mut decoder, &[0xbe]), Err(Malformed::Index(62)));
    assert_eq!(failure(&hex("3fe21f")), Malformed::TableSize(4097));
    assert_eq!(failure(&hex("82 20")), Malformed::LateTableSize);
}

#[test]
fn oversized_entry_empties_the_table() {
    let mut decoder = Decoder::default();
    decode(&mut decoder, &remembered("a", "1")).unwrap();
    let large = "x".repeat(TABLE_BYTES_MAX);
    assert_eq!(
        decode(&mut decoder, &remembered("large", &large)).unwrap(),
        fields(&[("large", &large)])
    );
    assert_eq!((decoder.entries.len(), decoder.size), (0, 0));
}

#[test]
fn the_table_is_bounded() {
    let mut decoder = Decoder::default();
    for number in 0..10_000 {
        decode(
            &mut decoder,
            &remembered(&format!("name-{number}"), "value"),
        )
        .unwrap();
        assert!(decoder.size <= TABLE_BYTES_MAX);
    }
    assert!(decoder.entries.len() <= TABLE_BYTES_MAX / ENTRY_OVERHEAD);
    assert_eq!(
        decode(&mut decoder, &[0xbe]).unwrap(),
        fields(&[("name-9999", "value")])
    );
}

#[test]
fn what_is_malformed_is_named() {
    assert_eq!(failure(&[0x80]), Malformed::Index(0));
    assert_eq!(failure(&[0xbe]), Malformed::Index(62));
    assert_eq!(
        failure(&hex("ff ffffff7f")),
        Malformed::Index(0x7f + 0x0fff_ffff)
    );
    assert_eq!(failure(&hex("ff ffffffff 0f")), Malformed::Integer);
    assert_eq!(failure(&hex("ff 80808080 00")), Malformed::Integer);
    assert_eq!(failure(&[0xff]), Malformed::Cut);
    assert_eq!(failure(&[0x00]), Malformed::Cut);
    assert_eq!(failure(&hex("00 01 61 05 62")), Malformed::Cut);
    // Padding of zeros, padding of a whole byte, and the end of a string inside it.
    assert_eq!(failure(&hex("00 81 18 00")), Malformed::Huffman);
    assert_eq!(failure(&hex("00 82 1fff 00")), Malformed::Huffman);
    assert_eq!(failure(&hex("00 84 ffffffff 00")), Malformed::Huffman);
}

proptest! {
    #[test]
    fn what_is_written_is_read_again(list in prop::collection::vec(("[a-z:-]{0,300}", ".{0,300}"), 0..20)) {
        let mut block = Vec::new();
        for (name, value) in &list {
            literal(name.as_bytes(), value.as_bytes(), &mut block);
        }
        let mut decoder = Decoder::default();
        prop_assert_eq!(decode(&mut decoder, &block).unwrap(), list);
        prop_assert_eq!(decoder.size, 0);
    }

    #[test]
    fn no_bytes_make_it_panic(blocks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 1..5)) {
        let mut decoder = Decoder::default();
        for block in blocks {
            let _ = decode(&mut decoder, &block);
            let sum: usize = decoder.entries.iter().map(Entry::size).sum();
            prop_assert_eq!(decoder.size, sum);
            prop_assert!(sum <= TABLE_BYTES_MAX);
        }
    }
}
