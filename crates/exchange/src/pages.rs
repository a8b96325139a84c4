//! Values of Parquet's pages, straight into packed rows.
//!
//! A column of numbers without nulls, as common writers store it, needs no Arrow array on its way: its pages hold either
//! the values or runs of their places in a dictionary. Whatever is stored in another way is [`Fit::Unfit`] and goes through
//! Arrow.
//!
//! - PA-1: a page may hold anything: what does not make sense is an error, and nothing is read or written outside.

use parquet::{
    basic::{Encoding, Type},
    column::page::{Page, PageReader},
    errors::{ParquetError, Result},
    file::{
        metadata::{ColumnChunkMetaData, RowGroupMetaData},
        serialized_reader::SerializedPageReader,
    },
};
use std::{fs::File, sync::Arc};

/// Bytes of rows of which all columns are put before the next ones: what stays in the nearest cache.
const BLOCK: usize = 20 << 10;
/// Most rows of a block.
const MOST: usize = 1024;

/// Whether rows were filled in, or have to go through Arrow.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fit {
    Filled,
    Unfit,
}

/// Where a column's values lie in packed rows.
pub(crate) struct Place {
    /// Of the file.
    pub leaf: usize,
    pub offset: usize,
    pub bytes: usize,
}

/// Columns of a row group, from some row on.
pub(crate) struct Pages {
    columns: Vec<Column>,
    width: usize,
}

impl Pages {
    /// Columns of a row group that go into rows of `width` bytes; `None` if one has another form.
    pub(crate) fn open(
        file: File,
        group: &RowGroupMetaData,
        places: &[Place],
        width: usize,
        first: usize,
    ) -> Result<Option<Self>> {
        let file = Arc::new(file);
        let mut columns = Vec::with_capacity(places.len());
        for place in places {
            let chunk = group.column(place.leaf);
            let Some(mut column) = Column::open(&file, chunk, group.num_rows(), place)? else {
                return Ok(None);
            };
            if column.skip(first)? == Fit::Unfit {
                return Ok(None);
            }
            columns.push(column);
        }
        Ok(Some(Self { columns, width }))
    }

    /// Fills in the next rows. What is unfit may have been written to in part.
    pub(crate) fn fill(&mut self, rows: &mut [u8]) -> Result<Fit> {
        // In eights, because that is how numbers are packed.
        let block = (BLOCK / self.width.max(1)).clamp(8, MOST) / 8 * 8;
        for rows in rows.chunks_mut(block * self.width.max(1)) {
            for column in &mut self.columns {
                let fit = match column.bytes {
                    1 => column.put::<1>(rows, self.width)?,
                    2 => column.put::<2>(rows, self.width)?,
                    4 => column.put::<4>(rows, self.width)?,
                    8 => column.put::<8>(rows, self.width)?,
                    _ => Fit::Unfit,
                };
                if fit == Fit::Unfit {
                    return Ok(fit);
                }
            }
        }
        Ok(Fit::Filled)
    }
}

fn broken(what: &str) -> ParquetError {
    ParquetError::General(format!("a page {what}"))
}

struct Column {
    pages: SerializedPageReader<File>,
    /// Whether there are levels that say which values are null.
    optional: bool,
    /// Bytes of a value in the file, of which those that matter come first.
    stored: usize,
    bytes: usize,
    offset: usize,
    dictionary: Vec<u8>,
    page: Option<Page>,
    /// Values of the page that were not yet used.
    left: usize,
    /// Where the next of them begin.
    at: usize,
    runs: Option<Runs>,
    /// Places in the dictionary that were just read.
    numbers: Vec<u32>,
}

impl Column {
    fn open(
        file: &Arc<File>,
        chunk: &ColumnChunkMetaData,
        rows: i64,
        place: &Place,
    ) -> Result<Option<Self>> {
        let about = chunk.column_descr();
        let stored = match about.physical_type() {
            Type::INT32 | Type::FLOAT => 4,
            Type::INT64 | Type::DOUBLE => 8,
            _ => return Ok(None),
        };
        if about.max_rep_level() > 0 || about.max_def_level() > 1 || stored < place.bytes {
            return Ok(None);
        }
        let rows = usize::try_from(rows).unwrap_or_default();
        Ok(Some(Self {
            pages: SerializedPageReader::new(Arc::clone(file), chunk, rows, None)?,
            optional: about.max_def_level() == 1,
            stored,
            bytes: place.bytes,
            offset: place.offset,
            dictionary: Vec::new(),
            page: None,
            left: 0,
            at: 0,
            runs: None,
            numbers: vec![0; MOST],
        }))
    }

    /// Goes to the next page with values.
    fn turn(&mut self) -> Result<Fit> {
        while self.left == 0 {
            let page = self.pages.get_next_page()?.ok_or_else(|| broken("is missing"))?;
            let (values, encoding, start) = match &page {
                Page::DictionaryPage { buf, encoding, .. } => {
                    if !matches!(encoding, Encoding::PLAIN | Encoding::PLAIN_DICTIONARY) {
                        return Ok(Fit::Unfit);
                    }
                    let values = buf.chunks_exact(self.stored);
                    self.dictionary =
                        values.flat_map(|value| &value[..self.bytes]).copied().collect();
                    continue;
                }
                Page::DataPage { buf, num_values, encoding, def_level_encoding, .. } => {
                    let values = *num_values as usize;
                    let mut start = 0;
                    if self.optional {
                        if *def_level_encoding != Encoding::RLE {
                            return Ok(Fit::Unfit);
                        }
                        let length = buf.first_chunk().ok_or_else(|| broken("has no levels"))?;
                        start = 4 + u32::from_le_bytes(*length) as usize;
                        let levels = buf.get(4..start).ok_or_else(|| broken("has no levels"))?;
                        if !all_are_there(levels, values)? {
                            return Ok(Fit::Unfit);
                        }
                    }
                    (values, *encoding, start)
                }
                Page::DataPageV2 {
                    num_values,
                    encoding,
                    num_nulls,
                    def_levels_byte_len,
                    rep_levels_byte_len,
                    ..
                } => {
                    if *num_nulls > 0 {
                        return Ok(Fit::Unfit);
                    }
                    let start = *def_levels_byte_len as usize + *rep_levels_byte_len as usize;
                    (*num_values as usize, *encoding, start)
                }
            };
            (self.left, self.at) = (values, start);
            self.runs = match encoding {
                Encoding::PLAIN => None,
                Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY if values == 0 => None,
                Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY => {
                    let bits = page.buffer().get(start).copied();
                    let bits =
                        bits.filter(|bits| *bits <= 32).ok_or_else(|| broken("has no width"))?;
                    self.at += 1;
                    Some(Runs { bits: bits.into(), run: Run::Same { value: 0, left: 0 } })
                }
                _ => return Ok(Fit::Unfit),
            };
            self.page = Some(page);
        }
        Ok(Fit::Filled)
    }

    /// Leaves out values.
    fn skip(&mut self, mut count: usize) -> Result<Fit> {
        while count > 0 {
            if self.left == 0 {
                let next = self.pages.peek_next_page()?.ok_or_else(|| broken("is missing"))?;
                let values = next.num_rows.or(next.num_levels).filter(|_| !next.is_dict);
                if let Some(values) = values.filter(|values| *values <= count) {
                    self.pages.skip_next_page()?;
                    count -= values;
                    continue;
                }
                if self.turn()? == Fit::Unfit {
                    return Ok(Fit::Unfit);
                }
            }
            let mut some = count.min(self.left);
            let page = self.page.as_ref().ok_or_else(|| broken("is missing"))?.buffer();
            match &mut self.runs {
                None => self.at += some * self.stored,
                Some(runs) => {
                    some = some.min(MOST);
                    runs.read(page, &mut self.at, &mut self.numbers[..some])?;
                }
            }
            self.left -= some;
            count -= some;
        }
        Ok(Fit::Filled)
    }

    /// Puts the next values into their place in rows.
    fn put<const N: usize>(&mut self, mut rows: &mut [u8], width: usize) -> Result<Fit> {
        while !rows.is_empty() {
            if self.turn()? == Fit::Unfit {
                return Ok(Fit::Unfit);
            }
            let some = (rows.len() / width).min(self.left);
            let (now, later) = rows.split_at_mut(some * width);
            let page = self.page.as_ref().ok_or_else(|| broken("is missing"))?.buffer();
            match &mut self.runs {
                None => {
                    let end = self.at + some * self.stored;
                    let values = page.get(self.at..end).ok_or_else(|| broken("is too short"))?;
                    for (row, value) in
                        now.chunks_exact_mut(width).zip(values.chunks_exact(self.stored))
                    {
                        row[self.offset..self.offset + N].copy_from_slice(&value[..N]);
                    }
                    self.at = end;
                }
                Some(runs) => {
                    let numbers = &mut self.numbers[..some];
                    runs.read(page, &mut self.at, numbers)?;
                    let dictionary = self.dictionary.as_chunks::<N>().0;
                    let most = numbers.iter().copied().max().unwrap_or_default();
                    if most as usize >= dictionary.len() {
                        return Err(broken("names a value that its dictionary does not have"));
                    }
                    for (row, &number) in now.chunks_exact_mut(width).zip(&*numbers) {
                        row[self.offset..self.offset + N]
                            .copy_from_slice(&dictionary[number as usize]);
                    }
                }
            }
            self.left -= some;
            rows = later;
        }
        Ok(Fit::Filled)
    }
}

/// Whether levels of one bit say that no value is null.
fn all_are_there(levels: &[u8], values: usize) -> Result<bool> {
    let mut runs = Runs { bits: 1, run: Run::Same { value: 0, left: 0 } };
    let (mut at, mut left) = (0, values);
    while left > 0 {
        runs.next(levels, &mut at)?;
        match &mut runs.run {
            Run::Same { value: 0, .. } => return Ok(false),
            Run::Same { left: run, .. } => left -= left.min(*run),
            Run::Packed { start, left: run, .. } => {
                let some = left.min(*run);
                let bytes = levels.get(*start..*start + some.div_ceil(8));
                let bytes = bytes.ok_or_else(|| broken("has too few levels"))?;
                let (last, whole) = bytes.split_last().ok_or_else(|| broken("has no levels"))?;
                let mask = 0xff_u8 >> (some.next_multiple_of(8) - some);
                if whole.iter().any(|byte| *byte != 0xff) || last & mask != mask {
                    return Ok(false);
                }
                left -= some;
            }
        }
        runs.run = Run::Same { value: 0, left: 0 };
    }
    Ok(true)
}

/// Parquet's mix of repeated and of packed numbers.
struct Runs {
    bits: usize,
    run: Run,
}

enum Run {
    /// One number, so many times.
    Same { value: u32, left: usize },
    /// Numbers side by side, from a byte of the page on, some of which are used already.
    Packed { start: usize, used: usize, left: usize },
}

impl Runs {
    /// Reads the head of the next run.
    fn next(&mut self, page: &[u8], at: &mut usize) -> Result<()> {
        let mut head = 0_u64;
        for shift in (0..35).step_by(7) {
            let byte = *page.get(*at).ok_or_else(|| broken("ends within a run"))?;
            *at += 1;
            head |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        let count = (head >> 1) as usize;
        if count == 0 {
            return Err(broken("has a run of nothing"));
        }
        if head & 1 == 1 {
            self.run = Run::Packed { start: *at, used: 0, left: count * 8 };
            *at += count * self.bits;
            return Ok(());
        }
        let bytes = self.bits.div_ceil(8);
        let value = page.get(*at..*at + bytes).ok_or_else(|| broken("ends within a run"))?;
        let value = value.iter().rev().fold(0_u64, |value, byte| value << 8 | u64::from(*byte));
        *at += bytes;
        self.run = Run::Same { value: value as u32, left: count };
        Ok(())
    }

    /// Reads the next numbers.
    fn read(&mut self, page: &[u8], at: &mut usize, mut numbers: &mut [u32]) -> Result<()> {
        while !numbers.is_empty() {
            if let Run::Same { left: 0, .. } | Run::Packed { left: 0, .. } = self.run {
                self.next(page, at)?;
            }
            let (Run::Same { left, .. } | Run::Packed { left, .. }) = self.run;
            let (some, rest) = numbers.split_at_mut(left.min(numbers.len()));
            match &mut self.run {
                Run::Same { value, left } => {
                    some.fill(*value);
                    *left -= some.len();
                }
                Run::Packed { start, used, left } => {
                    let end = *start + ((*used + some.len()) * self.bits).div_ceil(8);
                    let packed =
                        page.get(*start..end).ok_or_else(|| broken("ends within a run"))?;
                    unpack(packed, self.bits, *used, some);
                    (*used, *left) = (*used + some.len(), *left - some.len());
                }
            }
            numbers = rest;
        }
        Ok(())
    }
}

/// Reads numbers of so many bits, from the number `first` on.
fn unpack(packed: &[u8], bits: usize, first: usize, numbers: &mut [u32]) {
    // Eight numbers fill whole bytes.
    let head = numbers.len().min(first.next_multiple_of(8) - first);
    let (head, numbers) = numbers.split_at_mut(head);
    let one = |number: usize| {
        let bytes = packed.get(number * bits / 8..).unwrap_or_default().iter().take(8);
        let word = bytes.rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        (word >> (number * bits % 8) & ((1 << bits) - 1)) as u32
    };
    let (mut next, eights) =
        (first + head.len(), bits.checked_sub(1).and_then(|at| EIGHTS.get(at)));
    head.iter_mut().zip(first..).for_each(|(place, number)| *place = one(number));
    let mut rest = numbers;
    if let Some(eights) = eights {
        let whole = rest.len() / 8 * 8;
        let (some, others) = rest.split_at_mut(whole);
        eights(&packed[(next * bits / 8).min(packed.len())..], some);
        (next, rest) = (next + whole, others);
    }
    rest.iter_mut().zip(next..).for_each(|(place, number)| *place = one(number));
}

type Eights = fn(&[u8], &mut [u32]);
/// By the number of bits, less one: with a width that the compiler knows, a number is a few instructions.
const EIGHTS: [Eights; 16] = [
    eights::<1>,
    eights::<2>,
    eights::<3>,
    eights::<4>,
    eights::<5>,
    eights::<6>,
    eights::<7>,
    eights::<8>,
    eights::<9>,
    eights::<10>,
    eights::<11>,
    eights::<12>,
    eights::<13>,
    eights::<14>,
    eights::<15>,
    eights::<16>,
];

/// Reads whole eights of numbers.
fn eights<const BITS: usize>(packed: &[u8], numbers: &mut [u32]) {
    let eights = numbers.as_chunks_mut::<8>().0.iter_mut();
    for (eight, packed) in eights.zip(packed.as_chunks::<BITS>().0) {
        for (within, number) in eight.iter_mut().enumerate() {
            let (byte, shift) = (within * BITS / 8, within * BITS % 8);
            let byte_at = |byte: usize| u32::from(if byte < BITS { packed[byte] } else { 0 });
            let word = byte_at(byte) | byte_at(byte + 1) << 8 | byte_at(byte + 2) << 16;
            *number = word >> shift & ((1 << BITS) - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_are_what_was_written(
            bits in 1_usize..20, parts in prop::collection::vec((any::<bool>(), 1_usize..9, any::<u32>()), 1..9),
            cut in 1_usize..40,
        ) {
            let (mut page, mut expected) = (Vec::new(), Vec::new());
            for (packed, count, seed) in parts {
                let number = |index: usize| (seed.rotate_left(index as u32)) & ((1 << bits) - 1);
                if packed {
                    page.push((count << 1 | 1) as u8);
                    let start = page.len();
                    page.resize(start + count * bits, 0);
                    for index in 0..count * 8 {
                        for bit in (0..bits).filter(|bit| number(index) >> bit & 1 == 1) {
                            page[start + (index * bits + bit) / 8] |= 1 << ((index * bits + bit) % 8);
                        }
                        expected.push(number(index));
                    }
                } else {
                    page.push((count << 1) as u8);
                    page.extend(&number(0).to_le_bytes()[..bits.div_ceil(8)]);
                    expected.extend(std::iter::repeat_n(number(0), count));
                }
            }
            let mut runs = Runs { bits, run: Run::Same { value: 0, left: 0 } };
            let (mut at, mut found) = (0, Vec::new());
            while found.len() < expected.len() {
                let mut some = vec![0; cut.min(expected.len() - found.len())];
                runs.read(&page, &mut at, &mut some).unwrap();
                found.extend(some);
            }
            prop_assert_eq!(&found, &expected);
            prop_assert!(runs.read(&page, &mut at, &mut [0]).is_err());
        }

        #[test]
        fn a_page_of_anything_is_no_panic(page in prop::collection::vec(any::<u8>(), 0..40), bits in 0_usize..33) {
            let mut runs = Runs { bits, run: Run::Same { value: 0, left: 0 } };
            let _ = runs.read(&page, &mut 0, &mut [0; 100]);
            let _ = all_are_there(&page, 100);
        }
    }
}
