//! How a row lies in memory, and how record batches become such rows and rows become tensors of a mini-batch.
//!
//! - LA-1: a packed row has no nulls: they are an error or have become the value that the user named.
//! - LA-2: dates and times are whole numbers of the unit that their column states; strings are the numbers of their
//!   categories in sorted order, the same on every rank.
//! - LA-3: columns that are one matrix in a mini-batch lie side by side in a row.

use crate::{
    Error, Result,
    memory::{LINE, ask_for},
};
use arrow_array::{
    Array, ArrayRef, RecordBatch, cast::AsArray, downcast_primitive_array, types::Int32Type,
};
use arrow_cast::{CastOptions, cast_with_options};
use arrow_schema::{DataType, Schema, TimeUnit};
use std::{
    borrow::Cow,
    collections::HashMap,
    fmt,
    ops::Range,
    sync::{Mutex, OnceLock, PoisonError},
};

/// Bytes of rows that are packed or taken apart before the next column's turn: what stays in the nearest cache.
const BLOCK: usize = 16 << 10;
/// With so few tensors, a row goes into each of them at once.
const FEW: usize = 8;
/// Rows between the one that is copied and the one that is asked for.
const SOON: usize = 16;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum DType {
    Bool,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    F16,
    F32,
    F64,
}

impl DType {
    /// Every type.
    pub const ALL: [Self; 12] = [
        Self::Bool,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::U8,
        Self::U16,
        Self::U32,
        Self::U64,
        Self::F16,
        Self::F32,
        Self::F64,
    ];

    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::Bool | Self::I8 | Self::U8 => 1,
            Self::I16 | Self::U16 | Self::F16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// As NumPy and PyTorch spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bool => "bool",
            Self::I8 => "int8",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::U8 => "uint8",
            Self::U16 => "uint16",
            Self::U32 => "uint32",
            Self::U64 => "uint64",
            Self::F16 => "float16",
            Self::F32 => "float32",
            Self::F64 => "float64",
        }
    }

    /// The type of that name.
    pub fn named(name: &str) -> Result<Self> {
        let unknown = || {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::Invalid(format!("there is no type {name:?} of tensors: take one of {names}"))
        };
        Self::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(unknown)
    }

    fn arrow(self) -> DataType {
        match self {
            Self::Bool => DataType::Boolean,
            Self::I8 => DataType::Int8,
            Self::I16 => DataType::Int16,
            Self::I32 => DataType::Int32,
            Self::I64 => DataType::Int64,
            Self::U8 => DataType::UInt8,
            Self::U16 => DataType::UInt16,
            Self::U32 => DataType::UInt32,
            Self::U64 => DataType::UInt64,
            Self::F16 => DataType::Float16,
            Self::F32 => DataType::Float32,
            Self::F64 => DataType::Float64,
        }
    }

    fn of(data: &DataType) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.arrow() == *data)
    }
}

/// What stands in for a null.
#[derive(Clone, Debug, PartialEq)]
pub enum Fill {
    /// A whole number; also of a date's unit, or of no category.
    Int(i64),
    /// Any number.
    Float(f64),
    /// A category.
    Text(String),
}

impl fmt::Display for Fill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(value) => write!(f, "{value}"),
            Self::Float(value) => write!(f, "{value}"),
            Self::Text(value) => write!(f, "{value:?}"),
        }
    }
}

impl Fill {
    /// Its bytes as an element, if it can be one.
    fn element(&self, dtype: DType) -> Option<Vec<u8>> {
        let bytes = |bytes: &[u8]| Some(bytes.to_vec());
        match (self, dtype) {
            (Self::Int(value @ 0..=1), DType::Bool) => bytes(&[*value as u8]),
            (Self::Int(value), DType::I8) => bytes(&i8::try_from(*value).ok()?.to_ne_bytes()),
            (Self::Int(value), DType::I16) => bytes(&i16::try_from(*value).ok()?.to_ne_bytes()),
            (Self::Int(value), DType::I32) => bytes(&i32::try_from(*value).ok()?.to_ne_bytes()),
            (Self::Int(value), DType::I64) => bytes(&value.to_ne_bytes()),
            (Self::Int(value), DType::U8) => bytes(&u8::try_from(*value).ok()?.to_ne_bytes()),
            (Self::Int(value), DType::U16) => bytes(&u16::try_from(*value).ok()?.to_ne_bytes()),
            (Self::Int(value), DType::U32) => bytes(&u32::try_from(*value).ok()?.to_ne_bytes()),
            (Self::Int(value), DType::U64) => bytes(&u64::try_from(*value).ok()?.to_ne_bytes()),
            (Self::Int(value), DType::F16 | DType::F32 | DType::F64) => {
                Self::Float(*value as f64).element(dtype)
            }
            (Self::Float(value), DType::F32) => bytes(&(*value as f32).to_ne_bytes()),
            (Self::Float(value), DType::F64) => bytes(&value.to_ne_bytes()),
            // Zero is the one that needs no rounding.
            (Self::Float(value), DType::F16) if *value == 0.0 => bytes(&[0, 0]),
            _ => None,
        }
    }
}

/// A column that the user wants.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Request {
    /// Its name.
    pub name: String,
    /// The type that its values become, if not their own.
    pub dtype: Option<DType>,
    /// What the bytes of a binary column are: type and shape.
    pub tensor: Option<(DType, Vec<usize>)>,
    /// What stands in for a null; else a null is an error.
    pub fill: Option<Fill>,
    /// The categories of a column of strings, in the order of their numbers; else all that there are, sorted.
    pub categories: Option<Vec<String>>,
}

/// The categories of a column. Numbers are given as values are met, and exchanged for final ones when rows are read.
#[derive(Default)]
struct Categories {
    /// No more may come.
    fixed: bool,
    met: Mutex<(HashMap<String, i64>, Vec<String>)>,
    /// By the number of the meeting: the final one. And the names in the final order.
    sorted: OnceLock<(Vec<i64>, Vec<String>)>,
}

impl Categories {
    fn new(given: Option<&[String]>) -> Self {
        let categories = Self { fixed: given.is_some(), ..Self::default() };
        if let Some(given) = given {
            given.iter().for_each(|name| {
                categories.number(name, true);
            });
        }
        categories
    }

    fn number(&self, name: &str, may_come: bool) -> Option<i64> {
        let mut met = self.met.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&number) = met.0.get(name) {
            return Some(number);
        }
        if !may_come {
            return None;
        }
        let number = met.1.len() as i64;
        met.0.insert(name.to_owned(), number);
        met.1.push(name.to_owned());
        Some(number)
    }

    /// No more will come: gives final numbers.
    fn sort(&self) {
        self.sorted.get_or_init(|| {
            let met = self.met.lock().unwrap_or_else(PoisonError::into_inner);
            let mut order: Vec<usize> = (0..met.1.len()).collect();
            if !self.fixed {
                order.sort_by(|&a, &b| met.1[a].cmp(&met.1[b]));
            }
            let mut numbers = vec![0; order.len()];
            order.iter().enumerate().for_each(|(number, &met)| numbers[met] = number as i64);
            (numbers, order.iter().map(|&index| met.1[index].clone()).collect())
        });
    }
}

/// What is done to a column's array.
enum Kind {
    /// Its values lie there as they are.
    Plain,
    Bool,
    /// Numbers of 32 bits that become 64.
    Widen,
    Categories(Categories),
    /// So many elements each.
    List(usize),
    /// So many bytes each.
    Binary(usize),
}

/// One column of every mini-batch.
pub struct Column {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    unit: Option<&'static str>,
    kind: Kind,
    /// What its array is cast to first.
    cast: Option<DataType>,
    fill: Option<(Fill, Vec<u8>)>,
    /// Where it lies in a row.
    place: Range<usize>,
}

impl Column {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape of one row's value; empty for one element.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// What a date or time counts: "day", "s", "ms", "us" or "ns", since 1970 if it is a date.
    pub fn unit(&self) -> Option<&'static str> {
        self.unit
    }

    /// Its categories in the order of their numbers, if it is one of strings.
    pub fn categories(&self) -> Option<&[String]> {
        let Kind::Categories(categories) = &self.kind else { return None };
        categories.sorted.get().map(|(_, names)| names.as_slice())
    }

    fn place(&self) -> String {
        format!("column {:?}", self.name)
    }
}

/// A tensor of every mini-batch: a column, or several as a matrix.
pub struct Field {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    /// Where it lies in a row.
    place: Range<usize>,
}

impl Field {
    /// That of its column, or of its group.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The shape of one row's value; empty for one element.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }
}

/// Columns that are one matrix in a mini-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The matrix's name.
    pub name: String,
    /// Those of its columns, from left to right.
    pub columns: Vec<String>,
}

/// How a row lies in memory.
pub struct Layout {
    columns: Vec<Column>,
    fields: Vec<Field>,
    width: usize,
    /// Whether a NaN is an error.
    refuse_nan: bool,
}

impl Layout {
    /// A layout of these columns of a schema, some of which are groups.
    pub fn new(
        schema: &Schema,
        requests: &[Request],
        groups: &[Group],
        refuse_nan: bool,
    ) -> Result<Self> {
        let mut columns = Vec::with_capacity(requests.len());
        for request in requests {
            let Ok(field) = schema.field_with_name(&request.name) else {
                let names = schema.fields().iter().map(|field| field.name().as_str());
                let names = names.collect::<Vec<_>>().join(", ");
                return Err(Error::Invalid(format!(
                    "there is no column {:?}: there are {names}",
                    request.name
                )));
            };
            columns.push(column(field.data_type(), request)?);
        }
        if columns.is_empty() {
            return Err(Error::Invalid("no column is wanted: name some".into()));
        }
        let of_columns: Vec<Vec<usize>> =
            groups.iter().map(|group| members(group, groups, &columns)).collect::<Result<_>>()?;
        let mut fields: Vec<Field> = Vec::with_capacity(columns.len());
        let mut width = 0;
        for index in 0..columns.len() {
            let group = of_columns.iter().position(|members| members.contains(&index));
            let members = group.map_or(vec![index], |group| of_columns[group].clone());
            // A group comes with its first column.
            if members.iter().any(|&member| member < index) {
                continue;
            }
            let start = width;
            for member in members {
                let column = &mut columns[member];
                let bytes = column.dtype.size() * column.shape.iter().product::<usize>();
                column.place = width..width + bytes;
                width += bytes;
            }
            let Column { name, dtype, shape, .. } = &columns[index];
            let (name, shape) = match group.map(|group| &groups[group]) {
                Some(group) => (&group.name, vec![group.columns.len()]),
                None => (name, shape.clone()),
            };
            if fields.iter().any(|field| field.name == *name) {
                return Err(Error::Invalid(format!(
                    "there are two tensors {name:?}: name the group otherwise"
                )));
            }
            fields.push(Field { name: name.clone(), dtype: *dtype, shape, place: start..width });
        }
        match width {
            0 => Err(Error::Invalid("the columns that are wanted have no elements".into())),
            _ => Ok(Self { columns, fields, width, refuse_nan }),
        }
    }

    /// The columns in their order.
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// The tensors of a mini-batch in their order.
    pub fn fields(&self) -> &[Field] {
        &self.fields
    }

    /// Bytes of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Names of the columns whose categories have to be met first.
    pub(crate) fn unmet(&self) -> Vec<&str> {
        let open = |column: &&Column| matches!(&column.kind, Kind::Categories(categories) if !categories.fixed);
        self.columns.iter().filter(open).map(Column::name).collect()
    }

    /// Meets the categories of a batch that has the unmet columns only.
    pub(crate) fn meet(&self, batch: &RecordBatch) -> Result<()> {
        for column in &self.columns {
            if let (Kind::Categories(categories), Some(array)) =
                (&column.kind, batch.column_by_name(&column.name))
            {
                numbers(column, categories, array, true)?;
            }
        }
        Ok(())
    }

    /// All categories are met.
    pub(crate) fn sort(&self) {
        for column in &self.columns {
            if let Kind::Categories(categories) = &column.kind {
                categories.sort();
            }
        }
    }

    /// Packs a batch into rows, which have just the room. `first` is the number of its first row, for messages.
    pub(crate) fn pack(&self, batch: &RecordBatch, first: u64, rows: &mut [u8]) -> Result<()> {
        debug_assert_eq!(rows.len(), batch.num_rows() * self.width);
        let mut flat = Vec::with_capacity(self.columns.len());
        for column in &self.columns {
            let missing = || Error::data(column.place(), "it is missing");
            let array = batch.column_by_name(&column.name).ok_or_else(missing)?;
            flat.push(self.flatten(column, array, first)?);
        }
        let flat: Vec<&[u8]> = flat.iter().map(Flat::bytes).collect();
        let block_rows = self.block();
        for (block, rows) in rows.chunks_mut(block_rows * self.width.max(1)).enumerate() {
            for (column, flat) in self.columns.iter().zip(&flat) {
                let bytes = column.place.len();
                let flat = &flat[block * block_rows * bytes..];
                match bytes {
                    1 => scatter::<1>(rows, self.width, column.place.start, flat),
                    2 => scatter::<2>(rows, self.width, column.place.start, flat),
                    4 => scatter::<4>(rows, self.width, column.place.start, flat),
                    8 => scatter::<8>(rows, self.width, column.place.start, flat),
                    0 => {}
                    _ => {
                        let rows = rows.chunks_exact_mut(self.width);
                        rows.zip(flat.chunks_exact(bytes)).for_each(|(row, value)| {
                            row[column.place.clone()].copy_from_slice(value)
                        });
                    }
                }
            }
        }
        Ok(())
    }

    /// Where the values of each column lie, if they are in rows as they are in a file with this schema; `None` if some are
    /// not. Leaves are not known here.
    pub(crate) fn stored(&self, schema: &Schema) -> Option<Vec<(&str, &Range<usize>)>> {
        let is_stored = |column: &Column| {
            let same = schema
                .field_with_name(&column.name)
                .is_ok_and(|field| *field.data_type() == column.dtype.arrow());
            let looked_at = self.refuse_nan && matches!(column.dtype, DType::F32 | DType::F64);
            same && matches!(column.kind, Kind::Plain) && column.shape.is_empty() && !looked_at
        };
        let stored = self.columns.iter().all(is_stored) && cfg!(target_endian = "little");
        let places = self.columns.iter().map(|column| (column.name.as_str(), &column.place));
        stored.then(|| places.collect())
    }

    /// Where each tensor of a mini-batch of `rows` rows begins, and the bytes of all.
    pub(crate) fn places(&self, rows: usize) -> (Vec<usize>, usize) {
        let mut end = 0;
        let places = self.fields.iter().map(|field| {
            let start = end;
            end += (field.place.len() * rows).next_multiple_of(LINE);
            start
        });
        (places.collect(), end)
    }

    /// Rows of a block.
    fn block(&self) -> usize {
        (BLOCK / self.width.max(1)).max(1)
    }

    /// Copies packed rows into tensors that begin at these places. `block` is room that is used again.
    pub(crate) fn draw<'a>(
        &self,
        rows: &[u64],
        row: impl Fn(u64) -> &'a [u8],
        places: &[usize],
        block: &mut Vec<u8>,
        tensors: &mut [u8],
    ) {
        let block_rows = self.block();
        for (index, drawn) in rows.chunks(block_rows).enumerate() {
            let first = index * block_rows;
            let soon = |within: usize| rows.get(first + within + SOON).map(|&soon| row(soon));
            if self.fields.len() <= FEW {
                for (within, &number) in drawn.iter().enumerate() {
                    soon(within).into_iter().for_each(ask_for);
                    let row = row(number);
                    for (field, &place) in self.fields.iter().zip(places) {
                        let bytes = field.place.len();
                        let start = place + (first + within) * bytes;
                        tensors[start..start + bytes].copy_from_slice(&row[field.place.clone()]);
                    }
                }
                continue;
            }
            block.clear();
            for (within, &number) in drawn.iter().enumerate() {
                soon(within).into_iter().for_each(ask_for);
                block.extend_from_slice(row(number));
            }
            for (field, &place) in self.fields.iter().zip(places) {
                let bytes = field.place.len();
                let values = &mut tensors[place + first * bytes..][..drawn.len() * bytes];
                let start = field.place.start;
                match bytes {
                    1 => gather::<1>(block, self.width, start, values),
                    2 => gather::<2>(block, self.width, start, values),
                    4 => gather::<4>(block, self.width, start, values),
                    8 => gather::<8>(block, self.width, start, values),
                    0 => {}
                    _ => {
                        let rows = block.chunks_exact(self.width);
                        rows.zip(values.chunks_exact_mut(bytes)).for_each(|(row, value)| {
                            value.copy_from_slice(&row[field.place.clone()])
                        });
                    }
                }
            }
        }
        self.number(rows.len(), places, tensors);
    }

    /// Gives categories their final numbers.
    fn number(&self, rows: usize, places: &[usize], tensors: &mut [u8]) {
        for column in &self.columns {
            let Kind::Categories(categories) = &column.kind else { continue };
            let Some((numbers, _)) = categories.sorted.get() else { continue };
            let holds = |field: &&Field| field.place.contains(&column.place.start);
            let held = self.fields.iter().zip(places).find(|(field, _)| holds(field));
            let Some((field, &place)) = held else { continue };
            let start = place + column.place.start - field.place.start;
            let values = tensors[start..].chunks_mut(field.place.len()).take(rows);
            for value in values.filter_map(|value| value.first_chunk_mut::<8>()) {
                let met = i64::from_ne_bytes(*value);
                // What is no category's number was named by the user and stays.
                let number = usize::try_from(met).ok().and_then(|met| numbers.get(met));
                *value = number.copied().unwrap_or(met).to_ne_bytes();
            }
        }
    }

    /// A column's values one after the other, as they will lie in the rows.
    fn flatten(&self, column: &Column, array: &ArrayRef, first: u64) -> Result<Flat> {
        let array: Cow<'_, ArrayRef> = match &column.cast {
            Some(target) if array.data_type() != target => Cow::Owned(cast(column, array, target)?),
            _ => Cow::Borrowed(array),
        };
        let width = column.dtype.size();
        let count = array.len();
        let null = |row: usize| {
            let what = format!("row {} is null", first + row as u64);
            let name = &column.name;
            Error::data(
                column.place(),
                format!(
                    "{what}: name what stands in for it with fill={{{name:?}: ...}}, or filter it out"
                ),
            )
        };
        let fill = column.fill.as_ref().map(|(_, bytes)| bytes.as_slice());
        let mut flat = match &column.kind {
            Kind::Plain if array.null_count() == 0 => {
                let flat = Flat::Array(array.into_owned());
                self.check_nan(column, flat.bytes(), first)?;
                return Ok(flat);
            }
            Kind::Plain => plain(&array).to_vec(),
            Kind::Bool => {
                let values = array.as_boolean().values();
                values.iter().map(u8::from).collect()
            }
            Kind::Widen => {
                let wide = plain(&array).as_chunks::<4>().0.iter();
                wide.flat_map(|&value| i64::from(i32::from_ne_bytes(value)).to_ne_bytes()).collect()
            }
            Kind::Categories(categories) => {
                let numbers = numbers(column, categories, &array, !categories.fixed)?;
                numbers.into_iter().flat_map(i64::to_ne_bytes).collect()
            }
            Kind::List(length) => {
                let list = array.as_fixed_size_list();
                let values = list.values().slice(list.value_offset_at(0) as usize, count * length);
                let mut flat = match column.dtype {
                    DType::Bool => values.as_boolean().values().iter().map(u8::from).collect(),
                    _ => plain(&values).to_vec(),
                };
                // What a null list holds inside means nothing.
                let inside = |index: usize| list.is_valid(index / length);
                put_fill(&values, width, &mut flat, fill, inside)
                    .map_err(|index| null(index / length))?;
                flat
            }
            Kind::Binary(bytes) => binary(column, &array, *bytes, first)?,
        };
        let bytes = column.place.len();
        if array.null_count() > 0 {
            let Some(fill) = fill else {
                let row = (0..count).find(|&row| array.is_null(row)).unwrap_or_default();
                return Err(null(row));
            };
            for row in (0..count).filter(|&row| array.is_null(row)) {
                flat[row * bytes..(row + 1) * bytes]
                    .chunks_exact_mut(width)
                    .for_each(|value| value.copy_from_slice(fill));
            }
        }
        self.check_nan(column, &flat, first)?;
        Ok(Flat::Bytes(flat))
    }

    fn check_nan(&self, column: &Column, flat: &[u8], first: u64) -> Result<()> {
        if self.refuse_nan
            && let Some(index) = find_nan(column.dtype, flat)
        {
            let row = first + (index * column.dtype.size() / column.place.len()) as u64;
            let what = format!("row {row} is NaN: filter it out, or take nan=\"keep\"");
            return Err(Error::data(column.place(), what));
        }
        Ok(())
    }
}

/// A column's values one after the other, as they came if that is how they lie in rows.
enum Flat {
    Array(ArrayRef),
    Bytes(Vec<u8>),
}

impl Flat {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Array(array) => plain(array),
            Self::Bytes(bytes) => bytes,
        }
    }
}

/// Where the columns of a group are.
fn members(group: &Group, groups: &[Group], columns: &[Column]) -> Result<Vec<usize>> {
    let wrong = |what: String| Err(Error::Invalid(format!("group {:?}: {what}", group.name)));
    if group.columns.is_empty() {
        return wrong("it has no columns".into());
    }
    let mut members: Vec<usize> = Vec::with_capacity(group.columns.len());
    for name in &group.columns {
        let Some(index) = columns.iter().position(|column| column.name == *name) else {
            return wrong(format!("there is no column {name:?} among those that are wanted"));
        };
        let times = groups.iter().flat_map(|group| &group.columns).filter(|other| *other == name);
        if times.count() > 1 {
            return wrong(format!("column {name:?} can be in one group once"));
        }
        let (column, first) = (&columns[index], &columns[*members.first().unwrap_or(&index)]);
        if !column.shape.is_empty() {
            return wrong(format!("column {name:?} is a tensor already"));
        }
        if column.dtype != first.dtype {
            let (own, other) = (column.dtype.name(), first.dtype.name());
            let what = format!("column {name:?} is {own}, and {:?} is {other}", first.name);
            return wrong(format!("{what}: name one type with columns={{{name:?}: {other:?}}}"));
        }
        members.push(index);
    }
    Ok(members)
}

fn find_nan(dtype: DType, flat: &[u8]) -> Option<usize> {
    match dtype {
        DType::F32 => {
            flat.as_chunks().0.iter().position(|&value| f32::from_ne_bytes(value).is_nan())
        }
        DType::F64 => {
            flat.as_chunks().0.iter().position(|&value| f64::from_ne_bytes(value).is_nan())
        }
        DType::F16 => {
            flat.as_chunks().0.iter().position(|&value| u16::from_ne_bytes(value) & 0x7fff > 0x7c00)
        }
        _ => None,
    }
}

/// Puts a value in place of nulls that count; the first such if there is none to put.
fn put_fill(
    array: &ArrayRef,
    width: usize,
    flat: &mut [u8],
    fill: Option<&[u8]>,
    counts: impl Fn(usize) -> bool,
) -> std::result::Result<(), usize> {
    if array.null_count() == 0 {
        return Ok(());
    }
    for index in (0..array.len()).filter(|&index| array.is_null(index) && counts(index)) {
        flat[index * width..(index + 1) * width].copy_from_slice(fill.ok_or(index)?);
    }
    Ok(())
}

/// The values of an array of fixed width.
fn plain(array: &ArrayRef) -> &[u8] {
    downcast_primitive_array!(
        array => array.values().inner().as_slice(),
        _ => &[],
    )
}

fn cast(column: &Column, array: &ArrayRef, target: &DataType) -> Result<ArrayRef> {
    let options = CastOptions { safe: false, ..CastOptions::default() };
    let failed = |error| {
        Error::data(
            column.place(),
            format!("it is {} and cannot become {target}: {error}", array.data_type()),
        )
    };
    cast_with_options(array, target, &options).map_err(failed)
}

/// The bytes of a column of binaries, all of the same length.
fn binary(column: &Column, array: &ArrayRef, bytes: usize, first: u64) -> Result<Vec<u8>> {
    let array = cast(column, array, &DataType::LargeBinary)?;
    let array = array.as_binary::<i64>();
    let mut flat = Vec::with_capacity(array.len() * bytes);
    for (row, value) in array.iter().enumerate() {
        match value {
            None => flat.resize(flat.len() + bytes, 0),
            Some(value) if value.len() == bytes => flat.extend_from_slice(value),
            Some(value) => {
                let what = format!("row {} has {} bytes", first + row as u64, value.len());
                return Err(Error::data(
                    column.place(),
                    format!("{what}, and its tensor has {bytes}"),
                ));
            }
        }
    }
    Ok(flat)
}

/// The numbers of the categories of an array of strings; anything at nulls.
fn numbers(
    column: &Column,
    categories: &Categories,
    array: &ArrayRef,
    may_come: bool,
) -> Result<Vec<i64>> {
    let plain = match array.data_type() {
        DataType::Utf8View | DataType::LargeUtf8 => {
            Cow::Owned(cast(column, array, &DataType::Utf8)?)
        }
        _ => Cow::Borrowed(array),
    };
    let dictionary = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
    let array = match *plain.data_type() == dictionary {
        true => plain,
        false => Cow::Owned(cast(column, &plain, &dictionary)?),
    };
    let array = array.as_dictionary::<Int32Type>();
    let names = array.values().as_string::<i32>();
    let mut known: Vec<Option<i64>> = vec![None; names.len()];
    let mut numbers = Vec::with_capacity(array.len());
    for key in array.keys() {
        let Some(key) = key.map(|key| key as usize).filter(|&key| names.is_valid(key)) else {
            numbers.push(0);
            continue;
        };
        let number = match known[key] {
            Some(number) => number,
            None => {
                let name = names.value(key);
                let number = categories.number(name, may_come).or_else(|| fill_number(column));
                let unseen = || {
                    let what = format!("{name:?} is not among its categories");
                    let name = &column.name;
                    Error::data(
                        column.place(),
                        format!(
                            "{what}: add it, or name what stands in for it with fill={{{name:?}: ...}}"
                        ),
                    )
                };
                *known[key].insert(number.ok_or_else(unseen)?)
            }
        };
        numbers.push(number);
    }
    Ok(numbers)
}

fn fill_number(column: &Column) -> Option<i64> {
    let (_, bytes) = column.fill.as_ref()?;
    Some(i64::from_ne_bytes(bytes.as_slice().try_into().ok()?))
}

/// What a column of this type becomes.
fn column(data: &DataType, request: &Request) -> Result<Column> {
    let name = &request.name;
    let wrong = |what: String| Err(Error::Invalid(format!("column {name:?}: {what}")));
    let text =
        |data: &DataType| matches!(data, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View);
    let unit = |unit: &TimeUnit| match unit {
        TimeUnit::Second => "s",
        TimeUnit::Millisecond => "ms",
        TimeUnit::Microsecond => "us",
        TimeUnit::Nanosecond => "ns",
    };
    let value = match data {
        DataType::Dictionary(_, value) => value.as_ref(),
        other => other,
    };
    let mut made = Column {
        name: name.clone(),
        dtype: DType::I64,
        shape: Vec::new(),
        unit: None,
        kind: Kind::Plain,
        cast: None,
        fill: None,
        place: 0..0,
    };
    match (value, &request.tensor, request.dtype) {
        (
            DataType::Binary
            | DataType::LargeBinary
            | DataType::BinaryView
            | DataType::FixedSizeBinary(_),
            Some((dtype, shape)),
            _,
        ) => {
            (made.dtype, made.shape) = (*dtype, shape.clone());
            made.kind = Kind::Binary(dtype.size() * shape.iter().product::<usize>());
        }
        (_, Some(_), _) => {
            return wrong(format!("it is {data}, and only binary columns hold tensors"));
        }
        (DataType::FixedSizeBinary(bytes), None, None) => {
            (made.dtype, made.shape) = (DType::U8, vec![*bytes as usize]);
            made.kind = Kind::Binary(*bytes as usize);
        }
        (DataType::Binary | DataType::LargeBinary | DataType::BinaryView, None, _) => {
            return wrong(format!(
                "it is {data}: say what its bytes are with tensors={{{name:?}: (\"float32\", (128,))}}"
            ));
        }
        (DataType::FixedSizeList(field, length), None, dtype) => {
            let Some(dtype) = dtype.or_else(|| DType::of(field.data_type())) else {
                return wrong(format!("it is {data}, and lists of such values cannot be tensors"));
            };
            (made.dtype, made.shape) = (dtype, vec![*length as usize]);
            made.kind = Kind::List(*length as usize);
            if DType::of(field.data_type()) != Some(dtype) {
                let field = field.as_ref().clone().with_data_type(dtype.arrow());
                made.cast = Some(DataType::FixedSizeList(field.into(), *length));
            }
        }
        (value, None, Some(dtype)) => {
            (made.dtype, made.cast) = (dtype, Some(dtype.arrow()));
            if value.is_nested() {
                return wrong(format!("it is {data} and cannot become {}", dtype.name()));
            }
            if dtype == DType::Bool {
                made.kind = Kind::Bool;
            }
        }
        (DataType::Boolean, ..) => {
            (made.dtype, made.kind, made.cast) = (DType::Bool, Kind::Bool, Some(DataType::Boolean))
        }
        (DataType::Date32, ..) => {
            (made.kind, made.unit, made.cast) = (Kind::Widen, Some("day"), Some(value.clone()));
        }
        (DataType::Time32(of), ..) => {
            (made.kind, made.unit, made.cast) = (Kind::Widen, Some(unit(of)), Some(value.clone()))
        }
        (DataType::Date64, ..) => (made.unit, made.cast) = (Some("ms"), Some(value.clone())),
        (DataType::Timestamp(of, _) | DataType::Time64(of) | DataType::Duration(of), ..) => {
            (made.unit, made.cast) = (Some(unit(of)), Some(value.clone()));
        }
        (value, ..) if text(value) => {
            made.kind = Kind::Categories(Categories::new(request.categories.as_deref()))
        }
        (value, ..) => match DType::of(value) {
            Some(dtype) => (made.dtype, made.cast) = (dtype, Some(value.clone())),
            None => {
                let what = format!("it is {data}, which is no tensor");
                return wrong(format!(
                    "{what}: leave it out, or name a type with columns={{{name:?}: \"float32\"}}"
                ));
            }
        },
    }
    if request.categories.is_some() && !matches!(made.kind, Kind::Categories(_)) {
        return wrong(format!("it is {data}, and only strings have categories"));
    }
    if let Some(fill) = &request.fill {
        let number = match (fill, &made.kind) {
            (Fill::Text(name), Kind::Categories(categories)) => categories
                .number(name, !categories.fixed)
                .map(|number| number.to_ne_bytes().to_vec()),
            // The number of a category would be another one once they are sorted.
            (Fill::Int(0..), Kind::Categories(categories)) if !categories.fixed => None,
            _ => fill.element(made.dtype),
        };
        let Some(bytes) = number else {
            return wrong(format!("{fill} cannot stand in for a null of {}", made.dtype.name()));
        };
        made.fill = Some((fill.clone(), bytes));
    }
    Ok(made)
}

/// Puts values one after the other into rows.
fn scatter<const N: usize>(rows: &mut [u8], width: usize, offset: usize, values: &[u8]) {
    let values = values.as_chunks::<N>().0;
    for (row, value) in rows.chunks_exact_mut(width).zip(values) {
        row[offset..offset + N].copy_from_slice(value);
    }
}

/// Takes values out of rows.
fn gather<const N: usize>(rows: &[u8], width: usize, offset: usize, values: &mut [u8]) {
    let values = values.as_chunks_mut::<N>().0;
    for (row, value) in rows.chunks_exact(width).zip(values) {
        value.copy_from_slice(&row[offset..offset + N]);
    }
}
